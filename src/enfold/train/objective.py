"""Objectives: what each member minimises, as one loss per member, (M,).

`fit` sums them: the gradient of parameters that only one member uses is then the same as if it were trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.data.dataset import class_labels
from enfold.engines.inputs import in_type_of
from enfold.engines.outputs import at_least_float32, require_classes
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits


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


def batch_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of all members, (M, B, C), in float32 or better: on the same inputs, or each on its own."""
    if not batch.own:
        logits = member_logits(model, batch.inputs)
    elif isinstance(model, Ensemble):
        logits = model.forward_each(in_type_of(model, batch.inputs))
    else:
        logits = member_logits(model, batch.inputs.squeeze(0))  # a plain network, or a view of one member
    return at_least_float32(logits)


def batch_labels(batch: Batch, num_members: int) -> Tensor:
    """Return the labels of each member, (M, B)."""
    return batch.labels if batch.own else batch.labels.expand(num_members, -1)


def batch_classes(batch: Batch, logits: Tensor) -> Tensor:
    """Return the class indices (M, B) for logits (M, B, C); labels of a loader are checked here."""
    num_members, size, num_classes = logits.shape
    labels = batch_labels(batch, num_members) if batch.labels.ndim == 1 + batch.own else batch.labels
    if batch.indices is not None:
        return labels
    if labels.shape != (num_members, size):
        raise EnfoldError(
            f"cross-entropy needs one label per example, got labels of shape {tuple(batch.labels.shape)} for {size} "
            "examples: pass class indices of shape (B,), or your own objective"
        )
    return class_labels(labels, num_classes, "a batch")


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy with the labels.

    Args:
        label_smoothing: Label smoothing, for all members or one value per member.
    """

    label_smoothing: float | Sequence[float] = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        return self.of_logits(batch_logits(model, batch), batch)

    def member(self, index: int) -> CrossEntropy:
        """Return the objective of one member."""
        return CrossEntropy(self.label_smoothing[index]) if isinstance(self.label_smoothing, Sequence) else self

    def of_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each member from given logits (M, B, C)."""
        log_probs = torch.log_softmax(require_classes(logits, "cross-entropy"), dim=-1)
        num_members, size, _ = log_probs.shape
        target = batch_classes(batch, log_probs).reshape(-1)
        try:
            nll = F.nll_loss(log_probs.flatten(0, 1), target, reduction="none").view(num_members, size).mean(1)
        except IndexError:  # labels of tensors in memory are compared with the outputs only here
            class_labels(target, log_probs.shape[-1], "a batch")
            raise
        smoothing = torch.as_tensor(self.label_smoothing, dtype=nll.dtype, device=nll.device)
        if not bool(smoothing.any()):
            return nll
        uniform = -log_probs.mean(dim=(1, 2))  # cross-entropy with the uniform distribution
        return (1 - smoothing) * nll + smoothing * uniform
