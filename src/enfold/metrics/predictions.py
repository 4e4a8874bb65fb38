"""Predictions: the only thing a metric may look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError

TOLERANCE = 1e-2  # of the sum of probabilities: half precision is normalised, logits are not


def mean_log_probs(log_probs: Tensor) -> Tensor:
    """Log of the mean probability over members, log p̄ = logsumexp_m log p_m - log M: (M, ..., C) -> (..., C)."""
    return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])


@dataclass(frozen=True)
class Predictions:
    """What M members say about N labelled examples, as normalised log-probabilities."""

    log_probs: Tensor  # (M, N, C)
    labels: Tensor  # (N,)

    def __post_init__(self) -> None:
        if self.log_probs.ndim != 3:
            raise EnfoldError(
                f"log_probs must have the shape (M, N, C), got {tuple(self.log_probs.shape)}: "
                "add the member axis with log_probs[None] for one network"
            )
        if self.labels.shape != self.log_probs.shape[1:2]:
            raise EnfoldError(
                f"there must be one label an example, got {tuple(self.labels.shape)} labels for "
                f"{self.log_probs.shape[1]} examples: pass labels of shape (N,)"
            )
        totals = self.log_probs.logsumexp(-1)
        if not torch.isfinite(totals).all():
            raise EnfoldError(
                "log_probs must be normalised log-probabilities, got NaN or infinite rows: "
                "look for diverged weights or NaN in the inputs"
            )
        if bool((totals.abs() > TOLERANCE).any()):
            worst = float(totals.flatten()[totals.abs().argmax()].exp())
            raise EnfoldError(
                f"log_probs must be normalised log-probabilities, got a row whose probabilities sum to {worst:.4g}: "
                "make them from logits with Predictions.from_logits"
            )

    @classmethod
    def from_logits(cls, logits: Tensor, labels: Tensor) -> Predictions:
        """Normalise logits (M, N, C) or, for one network, (N, C)."""
        logits = logits if logits.ndim == 3 else logits[None]
        return cls(torch.log_softmax(logits, dim=-1), labels)

    @property
    def num_members(self) -> int:
        """M."""
        return self.log_probs.shape[0]

    @property
    def num_classes(self) -> int:
        """C."""
        return self.log_probs.shape[2]

    def __len__(self) -> int:
        return self.labels.shape[0]

    def mean(self) -> Predictions:
        """The ensemble as one predictor: the mean of the members' probabilities, M = 1."""
        return Predictions(mean_log_probs(self.log_probs)[None], self.labels)

    def member(self, index: int) -> Predictions:
        """One member alone, M = 1."""
        return Predictions(self.log_probs[index][None], self.labels)

    def subset(self, members: Sequence[int]) -> Predictions:
        """Some of the members."""
        return Predictions(self.log_probs[list(members)], self.labels)
