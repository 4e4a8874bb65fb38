"""Task: what the outputs of a network mean.

A network returns (B, ...), an ensemble (M, B, ...), and a target is (B, ...). A task converts them to *rows*, one row
for each predictive distribution, with its K parameters and its target:

    values (M, N, K),   targets (N, ...)                                                               (1)

One label per example gives N = B rows, an image with H x W labels N = B H W rows, a sentence with T tokens N = B T
rows. Rows whose target is to be ignored are left out. Losses, distillation and metrics are formulas of rows, so that
they do not depend on the shape of the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.weights import Weights

if TYPE_CHECKING:
    from enfold.metrics.predictions import RowPredictions


@dataclass(frozen=True)
class Rows:
    """The outputs of all members with their targets, one row per predictive distribution, equation (1).

    Args:
        values: Parameters of the distributions, (M, N, K).
        targets: Targets (N, ...), or (M, N, ...) if members have batches of their own.
        weights: Weights of the rows in a loss, in the shape (N,) or (M, N); None for equal weights.
        chosen: Indices of these rows among all rows of the outputs; None if no row is left out.
    """

    values: Tensor
    targets: Tensor
    weights: Tensor | None = None
    chosen: Tensor | None = None

    def mean(self, losses: Tensor) -> Tensor:
        """Return the weighted mean over rows, Σ w l / Σ w: (M, N) -> (M,)."""
        if self.weights is None:
            return losses.mean(1)
        weights = self.weights.to(losses)
        return (weights * losses).sum(1) / weights.sum(-1)


@dataclass(frozen=True)
class Prediction:
    """Predictions of an ensemble for a batch, and their uncertainty. The fields are the same for every task.

    Args:
        mean: The mean prediction: probabilities in the shape of the outputs, or the mean of a regression.
        members: The prediction of every member, (M, *mean.shape).
        total: Total uncertainty of each prediction: the entropy of the mean in nats, or the variance of a regression.
        aleatoric: The part of `total` that every member has: the mean entropy or the mean variance of the members.
        epistemic: The part of `total` that comes from the disagreement of the members: their mutual information in
            nats, or the variance of their means.
        class_axis: The axis of `mean` with the classes; None if there is none.
    """

    mean: Tensor
    members: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    class_axis: int | None = -1

    @property
    def entropy(self) -> Tensor:
        """The entropy of the mean probabilities, equal to `total`."""
        self._require_probabilities("entropy", "total")
        return self.total

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of prediction and member, equal to `epistemic`."""
        self._require_probabilities("mutual_information", "epistemic")
        return self.epistemic

    @property
    def classes(self) -> Tensor:
        """The most probable class of every prediction."""
        self._require_probabilities("classes", "mean")
        assert self.class_axis is not None  # noqa: S101 - required above
        return self.mean.argmax(self.class_axis)

    def __repr__(self) -> str:
        """Return the shapes and the mean uncertainty instead of all numbers."""
        kind = "mean" if self.class_axis is None else "probabilities"
        parts = ", ".join(f"{name} {getattr(self, name).mean():.4g}" for name in ("total", "aleatoric", "epistemic"))
        return f"Prediction({len(self.members)} members, {kind} {tuple(self.mean.shape)}, on average {parts})"

    def _require_probabilities(self, name: str, other: str) -> None:
        if self.class_axis is None:
            raise EnfoldError(f"{name} needs probabilities of classes, got a prediction without classes: use {other}")


@dataclass(frozen=True)
class Task(ABC):
    """Base of all tasks: frozen dataclasses that convert outputs and targets to rows.

    A subclass defines the parameters K of a row, the loss of a row, and what members predict together.
    """

    name: ClassVar[str]
    """The name of the task for `task=`."""
    is_categorical: ClassVar[bool] = True
    """Whether a row has the logits of K classes, for which categorical distillation and metrics are defined."""

    @property
    def criterion(self) -> str:
        """The metric by which models are compared, lower is better."""
        return "nll"

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task with everything that follows from the shapes of a first batch.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.

        Raises:
            EnfoldError: If outputs and targets do not fit this task.
        """
        return self

    @abstractmethod
    def rows(self, outputs: Tensor) -> Tensor:
        """Return the parameters of all rows: (M, B, ...) -> (M, N, K)."""

    @abstractmethod
    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Return the targets of all rows, (N, ...), or (M, N, ...) if `own`.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too; targets in memory are checked once, before training.

        Raises:
            EnfoldError: If targets have another shape or type than the task needs.
        """

    def ignore_mask(self, targets: Tensor) -> Tensor | None:
        """Return which rows are left out, (N,), from the targets of all rows; None if this cannot happen."""
        return None

    def is_ignored(self, outputs: Tensor, targets: Any) -> bool:
        """Return whether all targets of a batch are to be ignored."""
        if not isinstance(targets, Tensor):
            return False
        ignored = self.ignore_mask(self.row_targets(outputs, targets, check=False))
        return ignored is not None and bool(ignored.all())

    def row_weights(self, targets: Tensor) -> Tensor | None:
        """Return the weight of each row from its target; None for equal weights."""
        return None

    @abstractmethod
    def row_losses(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return the loss of each row, without its weight: (M, N)."""

    def loss(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return the loss of each member, (M,): the weighted mean of the losses of its rows.

        Args:
            rows: Outputs and targets.
            smoothing: Label smoothing, for all members or one value per member; for tasks with classes.
        """
        return rows.mean(self.row_losses(rows, smoothing))

    @abstractmethod
    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Return the mean prediction of the members and its uncertainty: (M, B, ...).

        Args:
            outputs: Outputs of all members.
            weights: Normalized weights of the members; None for equal weights.
        """

    @abstractmethod
    def predictions(self, rows: Rows) -> RowPredictions:
        """Return what the metrics of this task are functions of, on the CPU."""

    def flatten(
        self, outputs: Tensor, targets: Any, weights: Tensor | None = None, *, own: bool = False, check: bool = True
    ) -> Rows:
        """Return outputs and targets as rows, without those to be ignored.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            weights: Weights of the examples, (B,) or (M, B); None for equal weights.
            own: Whether members have batches of their own.
            check: Whether values of targets are checked.

        Raises:
            EnfoldError: If outputs and targets do not fit the task, or all targets are to be ignored.
        """
        if not isinstance(targets, Tensor):
            raise EnfoldError(
                f"targets must be a tensor for task='{self.name}', got {type(targets).__name__}: return a tensor from "
                "the loader, or select it with unpack="
            )
        flat = self.row_targets(outputs, targets, own=own, check=check)
        rows = Rows(self.rows(outputs), flat, self.row_weights(flat))
        if weights is not None:
            each = spread(weights, flat.shape[: 1 + own])
            rows = replace(rows, weights=each if rows.weights is None else rows.weights * each)
        return self._leave_out(rows, own)

    def _leave_out(self, rows: Rows, own: bool) -> Rows:
        ignored = self.ignore_mask(rows.targets)
        if ignored is None or not bool(ignored.any()):
            return rows
        if bool(ignored.all()):
            raise EnfoldError(
                "a batch must have a target that is not ignored, got none: drop such batches, or check the options of "
                f"task='{self.name}' for ignored targets"
            )
        if own:  # the number of rows differs between members, so rows get the weight 0
            weights = torch.ones_like(ignored, dtype=rows.values.dtype) if rows.weights is None else rows.weights
            targets = torch.where(ignored, torch.zeros_like(rows.targets), rows.targets)
            return replace(rows, weights=weights * ~ignored, targets=targets)
        chosen = (~ignored).nonzero()[:, 0]
        return Rows(
            rows.values[:, chosen],
            rows.targets[chosen],
            None if rows.weights is None else rows.weights[chosen],
            chosen,
        )

    # Distillation

    def for_outputs(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task of a student of a teacher with this task, from the shapes of a first batch.

        Args:
            outputs: Outputs of the student, (S, B, ...).
            targets: Targets (B, ...), or (S, B, ...) if `own`.
            own: Whether students have batches of their own.
        """
        return self.resolve(outputs, targets, own=own)

    def stand_in_targets(self, outputs: Tensor) -> Tensor | None:
        """Return a tensor without storage in the shape of the targets, for batches without targets.

        Args:
            outputs: Outputs of the teachers, (T, B, ...).

        Returns:
            A tensor (B, ...); None if nothing about a student follows from the shape of the targets.
        """
        return None

    # Distillation of tasks without classes

    def mixture(self, values: Tensor, weights: Weights = None) -> Tensor:
        """Return the target of a student that matches the mean of the teachers: (T, N, K) -> (N, K').

        Args:
            values: Rows of the teachers.
            weights: Normalized weights of the teachers; None for equal weights.

        Raises:
            EnfoldError: For tasks with classes, whose distillation losses define their own targets.
        """
        raise EnfoldError(f"task='{self.name}' has no mixture of its own: use a loss for classes, such as KD()")

    def member_targets(self, values: Tensor) -> Tensor:
        """Return the target of a student that matches one teacher: (T, N, K) -> (T, N, K')."""
        return torch.stack([self.mixture(value[None]) for value in values])

    def divergence(self, values: Tensor, target: Tensor) -> Tensor:
        """Return the divergence of each student from a target of `mixture`: (S, N, K), ([S,] N, K') -> (S,)."""
        raise EnfoldError(f"task='{self.name}' has no divergence of its own: use a loss for classes, such as KD()")


def spread(weights: Tensor, shape: torch.Size) -> Tensor:
    """Return the weights of examples for their rows: (B,) -> (N,), or (M, B) -> (M, N)."""
    examples, rows = weights.shape[-1], shape[-1]
    return weights if examples == rows else weights.repeat_interleave(rows // examples, dim=-1)
