"""Which metrics tables and reports of a run show, from the scores that its models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# name of a metric -> title with unit, scale, digits
TITLES: dict[str, tuple[str, float, int]] = {
    "accuracy": ("accuracy (%)", 100, 2),
    "miou": ("mIoU (%)", 100, 2),
    "map": ("mAP (%)", 100, 2),
    "exact_match": ("exact match (%)", 100, 2),
    "rmse": ("RMSE", 1, 4),
    "mae": ("MAE", 1, 4),
    "r2": ("R²", 1, 3),
    "nll": ("NLL (nats)", 1, 4),
    "crps": ("CRPS", 1, 4),
    "pinball": ("pinball loss", 1, 4),
    "mse": ("MSE", 1, 4),
    "ece": ("ECE (%)", 100, 2),
    "brier": ("Brier", 1, 4),
    "coverage_90": ("coverage of 90 % intervals (%)", 100, 1),
    "width_90": ("width of 90 % intervals", 1, 3),
    "coverage": ("coverage (%)", 100, 1),
    "width": ("width", 1, 3),
}

# The kind of predictions is that of the first metric that all models have.
KINDS: dict[str, tuple[str, ...]] = {
    "miou": ("accuracy", "miou", "nll", "ece"),
    "map": ("map", "exact_match", "nll", "ece"),
    "accuracy": ("accuracy", "nll", "ece", "brier"),
    "pinball": ("rmse", "mae", "pinball", "coverage", "width"),
    "rmse": ("rmse", "mae", "r2", "nll", "crps", "coverage_90", "width_90"),
}


def shown_metrics(rows: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the metrics that a table shows: those of the task that a model has."""
    found = next((names for name, names in KINDS.items() if _in_all(rows, name)), KINDS["accuracy"])
    return tuple(name for name in found if any(name in row["scores"] for row in rows.values()))


def criterion_of(rows: Mapping[str, Any]) -> str:
    """Return the name of the metric by which models are compared: NLL, pinball loss or squared error."""
    return next((name for name in ("nll", "pinball", "mse") if _in_all(rows, name)), "nll")


def metric_title(name: str, *, unit: bool = False) -> str:
    """Return the name of a metric in texts, such as "NLL", or with its unit."""
    title = TITLES[name][0] if name in TITLES else name
    return title if unit else title.partition(" (")[0]


def needed_scores(rows: Mapping[str, Any]) -> set[str]:
    """Return the metrics without which results are damaged: those of the task, as far as all models have them."""
    kind = next((name for name in ("map", "pinball", "rmse") if _in_all(rows, name)), None)
    return {criterion_of(rows)} if kind else {"accuracy", "nll", "ece", "brier"}


def has_class_rows(rows: Mapping[str, Any]) -> bool:
    """Return whether the rows are those of one class per example."""
    return _in_all(rows, "brier") and _in_all(rows, "accuracy") and not _in_all(rows, "miou")


def _in_all(rows: Mapping[str, Any], name: str) -> bool:
    return bool(rows) and all(name in row["scores"] for row in rows.values())
