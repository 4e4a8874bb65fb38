"""Accuracy of one member on corrupted test images, by kind and severity: results/corruptions-by-severity.json.

python tools/accuracy_by_severity.py RUN    measures the members of a run and fills the table in docs/corruptions.md
python tools/accuracy_by_severity.py        fills the table from what was measured
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from enfold.analysis.corruptions import MEAN_MEMBER, corrupted_scores, images_of
from enfold.data.corruptions import KINDS, SEVERITIES
from enfold.data.dataset import some
from enfold.evaluate import predict
from enfold.io.files import write_json
from enfold.metrics import accuracy, per_member
from enfold.run import RunDirectory
from enfold.run.execute import cells
from enfold.run.stages import Cell
from enfold.saving import versions

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "results" / "corruptions-by-severity.json"
PAGE = ROOT / "docs" / "corruptions.md"
MARK = re.compile(r"(<!-- severities corruptions-by-severity -->\n).*?(<!-- end -->)", re.DOTALL)
EXAMPLES = 2000
Over = dict[str, Any]  # mean, std and values over seeds
Accuracies = Mapping[str, Mapping[str, Over]]  # kind -> severity -> over seeds


def of_seed(cell: Cell) -> dict[str, dict[str, float]]:
    """The accuracy of the mean member of one seed for every kind; severity 0 is clean."""
    members = cell.members()
    whole = images_of(cell.data)
    few = whole[some(whole.labels, EXAMPLES)]
    clean = float(per_member(accuracy, predict(members, cell.data.replace(test=few).test)).mean())
    found = corrupted_scores({"ensemble": members}, cell.data, KINDS, examples=EXAMPLES, members_of="ensemble")
    return {
        kind: {"0": clean, **{severity: scores["accuracy"] for severity, scores in by_severity.items()}}
        for kind, by_severity in found[MEAN_MEMBER].items()
    }


def over_seeds(values: Sequence[float]) -> Over:
    """A figure of every seed, with its mean and its standard deviation."""
    return {"mean": fmean(values), "std": stdev(values), "values": list(values)}


def rises(accuracies: Accuracies) -> dict[str, dict[str, Over]]:
    """Where accuracy does not fall from one severity to the next in the mean: kind -> "1 to 2" -> by how much."""
    found: dict[str, dict[str, Over]] = {}
    for kind, by_severity in accuracies.items():
        for before in range(max(SEVERITIES)):
            pair = (by_severity[str(severity)]["values"] for severity in (before, before + 1))
            step = over_seeds([after - first for first, after in zip(*pair, strict=True)])
            if step["mean"] >= 0:
                found.setdefault(kind, {})[f"{before} to {before + 1}"] = step
    return found


def table(record: Mapping[str, Any]) -> str:
    """Markdown, in percent; an arrow where every seed is better than at the severity before."""
    severities = [str(severity) for severity in (0, *SEVERITIES)]
    lines = [f"| kind | {' | '.join(severities)} |", "| --- |" + " ---: |" * len(severities)]
    for kind, by_severity in record["accuracy"].items():
        cells = [f"{100 * each['mean']:.1f} ± {100 * each['std']:.1f}" for each in map(by_severity.get, severities)]
        for step, difference in record["rises"].get(kind, {}).items():
            if min(difference["values"]) > 0:
                cells[int(step[-1])] += " ↑"
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def filled(page: str, record: Mapping[str, Any]) -> str:
    """The page with the table that the record has."""
    return MARK.sub(lambda found: found[1] + table(record) + found[2], page)


def measured(path: Path) -> dict[str, Any]:
    """All seeds of a run."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    seeds = [of_seed(cell) for cell in cells(run, recipe)]
    accuracies = {
        kind: {severity: over_seeds([seed[kind][severity] for seed in seeds]) for severity in seeds[0][kind]}
        for kind in KINDS
    }
    return {
        "command": "python tools/accuracy_by_severity.py RUN",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "recipe": recipe.name,
        "seeds": list(recipe.seeds),
        "members": recipe.members,
        "data": recipe.data.model_dump(mode="json"),
        "network": recipe.network,
        "examples": EXAMPLES,
        "accuracy": accuracies,
        "rises": rises(accuracies),
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_json(RESULT, measured(Path(sys.argv[1])))
    content = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), content), encoding="utf-8")
