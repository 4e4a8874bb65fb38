"""Objectives: what each member minimises, as one loss per member, (M,).

`fit` sums them: the gradient of parameters that only one member uses is then the same as if it were trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.data.dataset import Part
from enfold.engines.inputs import in_type_of
from enfold.engines.outputs import at_least_float32
from enfold.ensemble import Ensemble
from enfold.evaluate import member_logits
from enfold.tasks import TaskLike, as_task
from enfold.train.config import TrainConfig


class Objective(Protocol):
    """A function that `fit` minimises."""

    def __call__(self, model: nn.Module, batch: Batch, /) -> Tensor:
        """Return the loss of each member on this batch, (M,)."""


@dataclass(frozen=True)
class StepContext:
    """The position in a training.

    Args:
        seed: A seed for this step.
        progress: The fraction of all steps that is done.
    """

    seed: int = 0
    progress: float = 0.0


@runtime_checkable
class ByBatch(Protocol):
    """An objective that prepares each batch first, so that what all members need is computed once."""

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext, /) -> Objective:
        """Return the objective for this batch."""


@runtime_checkable
class HasDivergence(Protocol):
    """An objective that can be evaluated on examples without targets."""

    def divergence(self, model: nn.Module, part: Part, /) -> list[float]:
        """Return the divergence of each member from its teacher."""


def batch_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the outputs of all members, (M, B, ...), in float32 or better: on the same inputs, or each on its own."""
    if not batch.own:
        outputs = member_logits(model, batch.inputs)
    elif isinstance(model, Ensemble):
        outputs = model.forward_each(in_type_of(model, batch.inputs))
    else:
        outputs = member_logits(model, batch.inputs.squeeze(0))  # a plain network, or a view of one member
    return at_least_float32(outputs)


@dataclass(frozen=True)
class TaskLoss:
    """The loss of a task: cross-entropy for classes, a likelihood or an error for numbers.

    Args:
        task: The task; None to infer it from outputs and targets.
        label_smoothing: Label smoothing, for all members or one value per member.
    """

    task: TaskLike = None
    label_smoothing: float | Sequence[float] = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        return self.of_outputs(batch_outputs(model, batch), batch)

    def member(self, index: int) -> TaskLoss:
        """Return the objective of one member."""
        smoothing = self.label_smoothing
        return replace(self, label_smoothing=smoothing[index]) if isinstance(smoothing, Sequence) else self

    def of_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each member from given outputs (M, B, ...)."""
        task = as_task(self.task).resolve(outputs, batch.targets, own=batch.own)
        rows = task.flatten(outputs, batch.targets, batch.weights, own=batch.own)
        return task.loss(rows, self.label_smoothing)


def cross_entropy(label_smoothing: float | Sequence[float] = 0.0) -> TaskLoss:
    """Return the cross-entropy with class labels as an objective.

    Args:
        label_smoothing: Label smoothing, for all members or one value per member.
    """
    return TaskLoss("classification", label_smoothing)


def default_loss(config: TrainConfig, num_members: int) -> TaskLoss:
    """Return the loss of the task of a training, with the label smoothing of each member."""
    smoothing: float | Sequence[float] = config.label_smoothing
    if isinstance(smoothing, tuple):
        smoothing = config.per_member("label_smoothing", num_members)
    return TaskLoss(config.task, smoothing)
