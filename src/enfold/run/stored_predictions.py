"""Predictions as named tensors, and back: those of every task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

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
        found["log_probs"] = found["log_probs"].float()
    about = {"kind": name, **{each: getattr(predictions, each) for each in others}}
    return found, about | ({} if predictions.weights is None else {"weights": list(predictions.weights)})


def from_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> RowPredictions:
    """Invert `to_tensors`."""
    kind, _, others = KINDS[about.get("kind", "Predictions")]
    found = kind(**tensors, **{each: about[each] for each in others})
    return found.with_weights(about.get("weights"))


def describe_parts(abouts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the metadata of a file of several predictions."""
    return {part: json.dumps(about) for part, about in abouts.items()}
