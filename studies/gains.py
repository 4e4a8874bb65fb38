"""The part of the ensemble's gain that each row recovers, in NLL and after temperature scaling."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from enfold.errors import EnfoldError
from studies.evidence import MEAN_MEMBER, Evidence, RowName

METRICS = ("nll", "cnll")


def gains(evidence: Evidence, label: str) -> dict[str, float] | None:
    """Return (member - row) / (member - ensemble) for the means over the row's seeds, 1 for the ensemble itself.

    Args:
        evidence: The stored results.
        label: The row's label in the run.

    Returns:
        The fraction for "nll" and "cnll"; None if the row has none, or the ensemble gains nothing.
    """
    name = RowName.parse(label)
    prefix = f"{name.run}/" if name.run else ""
    found: dict[str, float] = {}
    for metric in () if name.path else METRICS:
        values = _means(evidence, (label, f"{prefix}{MEAN_MEMBER}", f"{prefix}ensemble"), metric)
        if values is not None and values[1] > values[2]:
            row, member, ensemble = values
            found[metric] = (member - row) / (member - ensemble)
    return found or None


def _means(evidence: Evidence, labels: tuple[str, str, str], metric: str) -> list[float] | None:
    try:
        rows = [evidence.row(label, metric) for label in labels]
    except EnfoldError:  # a row without this metric
        return None
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return None
    common = set.intersection(*(set(row.seeds) for row in present))
    return [statistics.fmean(row.select(common).values) for row in present] if common else None


def gain_columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the headings of the columns of gains, none if no row has one."""
    return ["gain recovered: NLL (%)", "cNLL (%)"] if any(row.get("gain") for row in rows) else []


def gain_cells(row: Mapping[str, Any], columns: list[str]) -> list[str]:
    """Return the text of the gains of a row."""
    found = row.get("gain") or {}
    return [f"{100 * found[metric]:.0f}" if metric in found else "-" for metric in METRICS[: len(columns)]]
