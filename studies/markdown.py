"""Markdown tables for the pages of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.tables import format_pair

Content = Mapping[str, Any]  # the content of a results file
METRICS = {  # metric: heading, factor to its unit, digits of published values in claims, digits of ours
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


def make_table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are aligned left, the others right."""
    rule = [*["---"] * left, *["---:"] * (len(lines[0]) - left)]
    return "".join(f"| {' | '.join(texts)} |\n" for texts in (lines[0], rule, *lines[1:]))


def format_spread(value: Content | None, scale: float, digits: int) -> str:
    """Return mean and standard deviation; a dash for a missing value."""
    if value is None:
        return "-"
    std = "" if value["std"] is None else f" ± {scale * value['std']:.{digits}f}"
    return f"{scale * value['mean']:.{digits}f}{std}"


def metric_format(metric: str) -> tuple[str, float, int]:
    """Return the heading, the factor to the unit and the digits of a metric."""
    name, scale, _, digits = METRICS.get(metric, (metric, 1, 3, 3))
    return name, scale, digits


def format_metric(value: Content | None, metric: str) -> str:
    """Return our value with the published one in brackets."""
    return format_pair(value, *metric_format(metric)[1:])
