"""The loss of learning from labels and from the mean prediction of an ensemble.

    L = (1 - α) L_task + α KL(p̄ || p),   p̄ = (1/M) Σ_m softmax(z_m)                         (1)

L_task is the loss of the task, cross-entropy for classes. For numbers, KL is the divergence of the task from the
mixture of the members (see `enfold.tasks.regression`). Targets to be ignored are left out of both terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.data.dataset import evaluation_batches
from enfold.data.tree import to_device
from enfold.engines.modes import ensure_eval_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.io.files import digest
from enfold.metrics.weights import mean_log_probs
from enfold.tasks import Task, TaskLike, first_batch_task
from enfold.train.config import PerMember
from enfold.train.objective import StepContext, TaskLoss, batch_outputs

CHUNK = 1024  # examples in a forward pass


class EnsembleLoss:
    """Equation (1) as an objective of `fit` for a model of one member.

    Args:
        ensemble: The members whose mean prediction is learned; they run in eval mode.
        data: Data whose training examples are used.
        alpha: α of equation (1).
        label_smoothing: Label smoothing of the cross-entropy.
        constant_inputs: Whether inputs are never augmented, so that predictions are computed once.
        task: What the outputs mean; None to infer it from the first batch.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        data: Data,
        alpha: float,
        label_smoothing: PerMember,
        *,
        constant_inputs: bool,
        task: TaskLike = None,
    ) -> None:
        self.ensemble, self.alpha, self.label_smoothing = ensemble, alpha, label_smoothing
        self.task = first_batch_task(task)
        self.targets: Tensor | None = None  # (N, K), see `_target`
        if constant_inputs and isinstance(data.train, Split):
            batches = evaluation_batches(data.train, CHUNK)
            found = torch.cat([self._target(inputs, targets).cpu() for inputs, targets, _ in batches])
            if len(found) == len(data.train):  # one row for each example
                self.targets = found

    @torch.no_grad()
    def _target(self, inputs: Any, targets: Any) -> Tensor:
        """Return what is learned about all rows of a batch, (N, K).

        For classes this is p̄ and, in a last column, Σ_k p̄_k ln p̄_k; for numbers, the mixture of the members.
        """
        device = next((tensor.device for tensor in self.ensemble.parameters()), torch.device("cpu"))
        with ensure_eval_mode(self.ensemble):
            outputs = member_logits(self.ensemble, to_device(inputs, device))
        if not bool(torch.isfinite(outputs).all()):
            raise EnfoldError("outputs of the members must be finite, got NaN or infinity: leave out diverged members")
        outputs = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
        task = self.task.resolve(outputs, targets)
        values, weights = task.rows(outputs), self.ensemble.member_weights
        if not task.is_categorical:
            return task.mixture(values) if weights is None else task.mixture(values, weights)
        log_probs = mean_log_probs(torch.log_softmax(values, dim=-1), weights)
        probs = log_probs.exp()
        return torch.cat([probs, (probs * log_probs).sum(-1, keepdim=True)], dim=-1)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, (1,)."""
        return self.for_batch(model, batch, StepContext())(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext) -> _BatchLoss:
        """Return the loss of one batch, for which the ensemble is run once.

        Args:
            model: The model.
            batch: The batch.
            context: The position in the training.
        """
        if self.targets is not None and batch.indices is not None:
            target = self.targets.index_select(0, batch.indices.cpu().flatten())
        else:
            inputs, targets = (each[0] if batch.own else each for each in (batch.inputs, batch.targets))
            target = self._target(inputs, targets)
        return _BatchLoss(target, self.alpha, self.label_smoothing, self.task)

    def __repr__(self) -> str:
        """The same in another process, as a checkpoint belongs to one ensemble."""
        members, weights = digest(self.ensemble.expand().values())[:16], self.ensemble.member_weights
        return f"EnsembleLoss({self.alpha}, {members}{weights or ''})"


@dataclass(frozen=True)
class _BatchLoss:
    target: Tensor
    alpha: float
    label_smoothing: PerMember
    task: Task

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, (1,)."""
        outputs = batch_outputs(model, batch)
        task = self.task.resolve(outputs, batch.targets, own=batch.own)
        divergence = self._divergence(task, outputs, batch)
        if self.alpha == 1:
            return divergence
        hard = TaskLoss(task, self.label_smoothing).of_outputs(outputs, batch)
        return self.alpha * divergence + (1 - self.alpha) * hard  # (1)

    def _divergence(self, task: Task, outputs: Tensor, batch: Batch) -> Tensor:
        values, target = task.rows(outputs), self.target.to(outputs.device)
        ignored = task.ignore_mask(task.row_targets(outputs, batch.targets, own=batch.own, check=False))
        if ignored is not None and bool(ignored.any()):
            known = (~ignored).flatten().nonzero()[:, 0]  # there is one member
            values, target = values[:, known], target[known]
        if not task.is_categorical:
            return task.divergence(values, target)
        log_probs = torch.log_softmax(values, dim=-1)
        classes, size = log_probs.shape[-1], log_probs.shape[-2]
        probs, negative_entropy = target[..., :classes], target[..., classes]
        return negative_entropy.mean(-1) - (log_probs * probs).sum((-2, -1)) / size

    def member(self, index: int) -> _BatchLoss:
        """Return the loss of the one member."""
        return self
