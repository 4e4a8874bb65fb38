"""Measure the accuracy of one member on corrupted test images, by kind and severity: python -m studies.ood.severity RUN

Writes corruptions-by-severity.json, which docs/corruptions.md shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from enfold.analysis.corruptions import MEAN_MEMBER, require_images, score_corruptions
from enfold.data.corruptions import KINDS, SEVERITIES
from enfold.data.dataset import some
from enfold.evaluate import predict
from enfold.io.files import write_json
from enfold.metrics import accuracy, per_member
from enfold.run import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.seed_run import SeedRun
from enfold.saving import versions
from studies.markdown import make_table

RESULT = Path(__file__).parent / "results" / "corruptions-by-severity.json"
EXAMPLES = 2000
Spread = dict[str, Any]  # mean, std and values over seeds
Accuracies = Mapping[str, Mapping[str, Spread]]  # kind: severity: spread


def measure_seed(seed_run: SeedRun) -> dict[str, dict[str, float]]:
    """Return the mean accuracy of the members of one seed for every kind and severity; severity 0 is clean."""
    members = seed_run.members()
    images = require_images(seed_run.data)
    subset = images[some(images.labels, EXAMPLES)]
    clean = float(per_member(accuracy, predict(members, seed_run.data.replace(test=subset).test)).mean())
    scores = score_corruptions({"ensemble": members}, seed_run.data, KINDS, examples=EXAMPLES, members_of="ensemble")
    return {
        kind: {"0": clean, **{severity: each["accuracy"] for severity, each in by_severity.items()}}
        for kind, by_severity in scores[MEAN_MEMBER].items()
    }


def spread_over_seeds(values: Sequence[float]) -> Spread:
    """Return the values of all seeds with mean and standard deviation."""
    return {"mean": fmean(values), "std": stdev(values), "values": list(values)}


def find_increases(accuracies: Accuracies) -> dict[str, dict[str, Spread]]:
    """Return where the mean accuracy does not drop from one severity to the next, as kind: "1 to 2": increase."""
    increases: dict[str, dict[str, Spread]] = {}
    for kind, by_severity in accuracies.items():
        for before in range(max(SEVERITIES)):
            pair = (by_severity[str(severity)]["values"] for severity in (before, before + 1))
            step = spread_over_seeds([after - first for first, after in zip(*pair, strict=True)])
            if step["mean"] >= 0:
                increases.setdefault(kind, {})[f"{before} to {before + 1}"] = step
    return increases


def severity_table(record: Mapping[str, Any]) -> str:
    """Return accuracies in percent; an arrow marks values that are higher than at the severity before in every seed."""
    severities = [str(severity) for severity in (0, *SEVERITIES)]
    lines = [["kind", *severities]]
    for kind, by_severity in record["accuracy"].items():
        texts = [f"{100 * each['mean']:.1f} ± {100 * each['std']:.1f}" for each in map(by_severity.get, severities)]
        for step, difference in record["rises"].get(kind, {}).items():
            if min(difference["values"]) > 0:
                texts[int(step[-1])] += " ↑"
        lines.append([kind, *texts])
    return make_table(lines)


def measure(path: Path) -> dict[str, Any]:
    """Return the accuracies of all seeds of a run."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    seeds = [measure_seed(seed_run) for seed_run in seed_runs(run, recipe)]
    accuracies = {
        kind: {severity: spread_over_seeds([seed[kind][severity] for seed in seeds]) for severity in seeds[0][kind]}
        for kind in KINDS
    }
    return {
        "command": "python -m studies.ood.severity RUN",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "recipe": recipe.name,
        "seeds": list(recipe.seeds),
        "members": recipe.members,
        "data": recipe.data.model_dump(mode="json"),
        "network": recipe.network,
        "examples": EXAMPLES,
        "accuracy": accuracies,
        "rises": find_increases(accuracies),
    }


if __name__ == "__main__":
    write_json(RESULT, measure(Path(sys.argv[1])))
