"""Write the tables of results/*.json into the docs, between their marks: rows of a run, and verdicts on claims.

<!-- rows cifar10-shares --> ... <!-- end -->        <!-- claims cifar10-shares --> ... <!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"(<!-- (rows|claims) ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Cell = tuple[str, str, str, float, int]  # heading, group of a row, its key, scale, digits

QUALITY: tuple[Cell, ...] = (
    ("accuracy (%)", "scores", "accuracy", 100, 2),
    ("NLL (nats)", "scores", "nll", 1, 3),
    ("ECE (%)", "scores", "ece", 100, 2),
)
COLUMNS: dict[str, tuple[Cell, ...]] = {
    "cifar10-shares": (
        *QUALITY,
        ("diversity", "diversity", "normalised_disagreement", 1, 2),
        ("a member (%)", "diversity", "member_accuracy", 100, 2),
        ("parameters", "cost", "parameters", 1, 0),
        ("MFLOPs", "cost", "flops", 1e-6, 1),
    ),
    "cifar10-distillation": (
        *QUALITY,
        ("cNLL", "scores", "cnll", 1, 3),
        ("cECE (%)", "scores", "cece", 100, 2),
        ("gain recovered (%)", "", "gain_recovered", 100, 0),
        ("corrupted: accuracy (%)", "corrupted", "accuracy", 100, 2),
        ("NLL", "corrupted", "nll", 1, 3),
        ("ECE (%)", "corrupted", "ece", 100, 2),
    ),
}
TITLES = {
    "mean member": "one network (mean member)",
    "ensemble": "deep ensemble of 4",
    "control": "control: the best member, trained on",
    "single-48-epochs": "control: one network, 48 epochs",
    "batch-ensemble": "BatchEnsemble, joint batch norm",
    "batch-ensemble-bn": "BatchEnsemble + EnsembleBN",
    "mimo": "MIMO, M = 3",
    "mc-dropout": "MC dropout 0.1, 4 samples",
    "swag": "SWAG, rank 20, 30 samples",
    "tree-net": "TreeNet",
    "mixture-0.4": "MixtureEnsembles, 0.4 networks",
    "mixture-1.0": "MixtureEnsembles, 1 network",
    "mixture-3.3": "MixtureEnsembles, 3.3 networks",
    "mixture-thin": "thin MixtureEnsembles, 1 network",
    "kd": "KD, temperature 4",
    "ae-kd": "AE-KD",
    "proxy-end2": "Proxy-EnD²",
    "latent-be": "KD + LatentBE",
    "latent-be-confods": "KD + LatentBE + ConfODS",
    "latent-be-tdiv-sdiv": "KD + LatentBE + TDiv-SDiv",
    "lone-student": "lone student: KD, temperature 1",
    "be-head": "BatchEnsemble student, head by head",
    "be-mean": "BatchEnsemble student, of the mean",
    "be-mean-3": "the same, 3 members",
    "be-mean-8": "the same, 8 members",
    "be-als": "BatchEnsemble student of the mean, ALS start",
    "be-tie": "BatchEnsemble student, head by head, tie 0.1",
}
METRICS = {  # of a claim: name, scale, digits of the published values and of ours
    "accuracy": ("accuracy (%)", 100, 1, 2),
    "nll": ("NLL", 1, 3, 3),
    "ece": ("ECE (%)", 100, 1, 2),
    "cnll": ("cNLL", 1, 3, 3),
    "cece": ("cECE (%)", 100, 1, 2),
    "diversity": ("diversity", 1, 2, 2),
    "disagreement": ("disagreement (%)", 100, 1, 2),
}


def table(lines: list[list[str]]) -> str:
    """Markdown with all columns but the first to the right."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def rows_of(name: str, content: Mapping[str, Any]) -> str:
    """One line a model."""
    columns = COLUMNS[name]
    lines = [["", *(heading for heading, *_ in columns)]]
    for label, row in content["rows"].items():
        lines.append([TITLES[label], *(_cell(row, column) for column in columns)])
    return table(lines)


def _cell(row: Mapping[str, Any], column: Cell) -> str:
    _, group, key, scale, digits = column
    values = row if not group else row.get(group) or {}
    value = values.get(key)
    if value is None:
        return "-"
    if not isinstance(value, Mapping):
        return f"{scale * value:,.{digits}f}"
    spread = "" if value["std"] is None else f" ± {scale * value['std']:.{digits}f}"
    return f"{scale * value['mean']:.{digits}f}{spread}"


def claims_of(name: str, content: Mapping[str, Any]) -> str:
    """How many held, and one line a claim."""
    judged = content["claims"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in judged["verdicts"].items() if count)
    lines = [["published ordering", "metric", "published", "ours", "verdict"]]
    for claim in judged["claims"]:
        metric, scale, rough, fine = METRICS[claim["metric"]]
        sides = (claim["first"], claim["second"])
        published = [_value(side["published"], scale, rough) for side in sides]
        ours = [_value(side["ours"] and side["ours"]["mean"], scale, fine) for side in sides]
        other = claim["source"] != judged["source"]["table"]
        says = f"{claim['says']}; {claim['source']}" if other else claim["says"]
        lines.append([says, metric, " / ".join(published), " / ".join(ours), claim["verdict"]])
    return f"\n{counts[0].upper()}{counts[1:]}.\n\n{table(lines)}"


def _value(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def filled(page: str) -> str:
    """A page with its tables as the results have them."""

    def made(found: re.Match[str]) -> str:
        opening, kind, name, closing = found.groups()
        content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        return f"{opening}{(rows_of if kind == 'rows' else claims_of)(name, content)}{closing}"

    return MARK.sub(made, page)


def pages() -> list[Path]:
    """All pages with marks."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if MARK.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
