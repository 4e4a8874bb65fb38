"""Predictions as named tensors, and back: those of every task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from enfold.metrics import (
    DensePredictions,
    GaussianPredictions,
    MultilabelPredictions,
    PointPredictions,
    Predictions,
    QuantilePredictions,
    RowPredictions,
)

Kind = Callable[..., RowPredictions]

# The tensors and the other arguments of each kind of predictions.
KINDS: dict[str, tuple[Kind, tuple[str, ...], tuple[str, ...]]] = {
    "Predictions": (Predictions, ("log_probs", "labels"), ()),
    "DensePredictions": (DensePredictions, ("log_probs", "labels"), ()),
    "MultilabelPredictions": (MultilabelPredictions, ("log_probs", "labels"), ("num_labels",)),
    "PointPredictions": (PointPredictions, ("means", "targets"), ()),
    "GaussianPredictions": (GaussianPredictions, ("means", "targets", "aleatoric", "epistemic"), ()),
    "QuantilePredictions": (QuantilePredictions, ("quantiles", "targets"), ("levels",)),
}


def to_tensors(predictions: RowPredictions) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return predictions as tensors, with log-probabilities in float32, and what they are, as JSON values."""
    name = type(predictions).__name__
    _, tensors, others = KINDS[name]
    values = {each: getattr(predictions, each) for each in tensors}
    found = {key: value.contiguous() for key, value in values.items() if value is not None}
    if "log_probs" in found:
        found["log_probs"] = found["log_probs"].float().contiguous()
    if predictions.weights is not None:
        found["weights"] = torch.tensor(predictions.weights, dtype=torch.float64)
    return found, {"kind": name, **{each: getattr(predictions, each) for each in others}}


def from_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> RowPredictions:
    """Invert `to_tensors`."""
    kind, names, others = KINDS[about.get("kind", "Predictions")]
    given = {name: tensors[name] for name in names if name in tensors}
    found = kind(**given, **{each: about[each] for each in others})
    return found.with_weights(tensors.get("weights"))
