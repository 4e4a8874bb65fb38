"""Weights of the training examples in a loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.train.objective import TaskLoss


@dataclass(frozen=True)
class WeightedLoss:
    """The loss of a task in which each training example has a weight, (1/B) Σ w l for weights of mean 1.

    Args:
        loss: The loss of the task.
        weights: One weight per example, (N,).
    """

    loss: TaskLoss
    weights: Tensor

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        weights = self.weights[batch.indices]
        return self.loss(model, replace(batch, weights=weights)) * weights.mean(-1)

    def member(self, index: int) -> WeightedLoss:
        """Return the loss of one member."""
        return replace(self, loss=self.loss.member(index))
