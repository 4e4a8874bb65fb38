"""Predictions: log-probabilities of the members and labels, the input of all metrics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.weights import Weights, as_weights, mean_log_probs, select_weights

__all__ = ["DensePredictions", "Predictions", "RowPredictions", "mean_log_probs"]

TOLERANCE = 1e-2  # of log Σ p: accepts half precision and refuses logits


class RowPredictions(ABC):
    """Predictions of M members for N targets, the input of the metrics of a task.

    `metrics.metrics_for` returns the metrics of each subclass.
    """

    headline: ClassVar[tuple[str, ...]] = ("accuracy", "nll", "ece", "brier")
    """The metrics that are printed in one line."""
    criterion: ClassVar[str] = "nll"
    """The metric by which models are compared, lower is better."""
    score: ClassVar[str] = "accuracy"
    """The metric beside the criterion in a training history."""
    weights: Weights = None
    """Weights of the members in the ensemble's prediction; None for equal weights."""

    @property
    @abstractmethod
    def num_members(self) -> int:
        """The number of members M."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of targets N."""

    @abstractmethod
    def mean(self) -> Self:
        """Return the ensemble as one predictor (M = 1)."""

    @abstractmethod
    def subset(self, members: Sequence[int]) -> Self:
        """Return the predictions of these members."""

    @abstractmethod
    def select(self, index: Tensor) -> Self:
        """Return the predictions for the targets at these indices (n,)."""

    @abstractmethod
    def uncertainty(self) -> Tensor:
        """Return the total uncertainty of every target (N,): the entropy of classes, the variance of numbers."""

    def member(self, index: int) -> Self:
        """Return the predictions of one member (M = 1)."""
        return self.subset([index])

    def with_weights(self, weights: Sequence[float] | Tensor | None) -> Self:
        """Return the predictions with other weights of the members; None for equal weights."""
        changed: Any = self
        return self if weights is None and self.weights is None else replace(changed, weights=weights)


@dataclass(frozen=True)
class Predictions(RowPredictions):
    """Normalized log-probabilities of M members for N labelled examples.

    Args:
        log_probs: Log-probabilities (M, N, C).
        labels: Class indices (N,).
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit or a row is not normalized.
    """

    log_probs: Tensor
    labels: Tensor
    weights: Weights = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.log_probs.ndim != 3:
            raise EnfoldError(
                f"log_probs must have shape (M, N, C), got {tuple(self.log_probs.shape)}: "
                "add the member axis with log_probs[None] for one network"
            )
        if self.labels.shape != self.log_probs.shape[1:2]:
            raise EnfoldError(
                f"labels must have shape ({self.log_probs.shape[1]},), one label per example, got "
                f"{tuple(self.labels.shape)}: pass labels of shape (N,)"
            )
        object.__setattr__(self, "weights", as_weights(self.weights, len(self.log_probs)))
        totals = self.log_probs.logsumexp(-1)
        if not torch.isfinite(totals).all():
            raise EnfoldError(
                "log_probs must be normalised log-probabilities, got NaN or infinite rows: "
                "check for diverged weights or NaN in the inputs"
            )
        if bool((totals.abs() > TOLERANCE).any()):
            worst = float(totals.flatten()[totals.abs().argmax()].exp())
            raise EnfoldError(
                f"log_probs must be normalised log-probabilities, got a row whose probabilities sum to {worst:.4g}: "
                "create Predictions from logits with Predictions.from_logits"
            )

    @classmethod
    def from_logits(cls, logits: Tensor, labels: Tensor) -> Predictions:
        """Return predictions from logits (M, N, C), or (N, C) for one network."""
        logits = logits if logits.ndim == 3 else logits[None]
        return cls(torch.log_softmax(logits, dim=-1), labels)

    @property
    def num_members(self) -> int:
        """The number of members M."""
        return self.log_probs.shape[0]

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self.log_probs.shape[2]

    def __len__(self) -> int:
        return self.labels.shape[0]

    def known(self) -> Predictions:
        """Return the rows that have a label: all, except those of labels that are unknown."""
        return self

    def mean(self) -> Self:
        """Return the ensemble as one predictor (M = 1): the mean of the members' probabilities."""
        return replace(self, log_probs=mean_log_probs(self.log_probs, self.weights)[None], weights=None)

    def member(self, index: int) -> Self:
        """Return the predictions of one member (M = 1)."""
        return replace(self, log_probs=self.log_probs[index][None], weights=None)

    def subset(self, members: Sequence[int]) -> Self:
        """Return the predictions of these members."""
        chosen = list(members)
        return replace(self, log_probs=self.log_probs[chosen], weights=select_weights(self.weights, chosen))

    def select(self, index: Tensor) -> Self:
        """Return the predictions for the examples at these indices (n,)."""
        return replace(self, log_probs=self.log_probs[:, index], labels=self.labels[index])

    def uncertainty(self) -> Tensor:
        """Return the entropy of the mean probabilities of every example, (N,)."""
        log_probs = mean_log_probs(self.log_probs, self.weights)
        return -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(-1)


@dataclass(frozen=True)
class DensePredictions(Predictions):
    """Log-probabilities of M members for N labelled positions, such as pixels or tokens, which are not ignored.

    Args:
        log_probs: Log-probabilities (M, N, C).
        labels: Class indices (N,).
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit or a row is not normalized.
    """

    headline: ClassVar[tuple[str, ...]] = ("accuracy", "miou", "nll", "ece")
    score: ClassVar[str] = "miou"
