"""Cells and tables in Markdown, for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enfold.report.reproduced import both

Content = Mapping[str, Any]  # of a file in results/
METRICS = {  # name, scale, digits of the published values in claims and of ours
    "accuracy": ("accuracy (%)", 100, 1, 2),
    "nll": ("NLL", 1, 3, 3),
    "ece": ("ECE (%)", 100, 1, 2),
    "cnll": ("cNLL", 1, 3, 3),
    "cece": ("cECE (%)", 100, 1, 2),
    "diversity": ("diversity", 1, 2, 2),
    "disagreement": ("disagreement (%)", 100, 1, 2),
    "corrupted accuracy": ("corrupted: accuracy (%)", 100, 1, 2),
    "corrupted nll": ("corrupted: NLL", 1, 3, 3),
    "corrupted ece": ("corrupted: ECE (%)", 100, 1, 2),
    "error": ("error (%)", 100, 1, 2),
}


def table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown with all columns but the first ones to the right."""
    rule = [*["---"] * left, *["---:"] * (len(lines[0]) - left)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def spread(found: Content | None, scale: float, digits: int) -> str:
    """Mean and standard deviation; a dash for what is missing."""
    if found is None:
        return "-"
    around = "" if found["std"] is None else f" ± {scale * found['std']:.{digits}f}"
    return f"{scale * found['mean']:.{digits}f}{around}"


def shown(metric: str) -> tuple[str, float, int]:
    """What a metric is called, its scale, and digits of ours."""
    name, scale, _, digits = METRICS.get(metric, (metric, 1, 3, 3))
    return name, scale, digits


def both_of(found: Content | None, metric: str) -> str:
    """Ours, with the published value in brackets."""
    return both(found, *shown(metric)[1:])
