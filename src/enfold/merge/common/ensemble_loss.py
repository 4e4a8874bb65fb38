"""The loss of learning from labels and from the mean prediction of an ensemble.

L = (1 - α) CE(y, p) + α KL(p̄ || p),   p̄ = (1/M) Σ_m softmax(z_m)                         (1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.data.dataset import evaluation_batches
from enfold.engines.modes import ensure_eval_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.io.files import digest
from enfold.metrics.predictions import mean_log_probs
from enfold.train.config import PerMember
from enfold.train.objective import StepContext, batch_outputs, cross_entropy

CHUNK = 1024  # examples in a forward pass


class EnsembleLoss:
    """Equation (1) as an objective of `fit` for a model of one member.

    Args:
        ensemble: The members whose mean prediction is learned; they run in eval mode.
        data: Data whose training examples are used.
        alpha: α of equation (1).
        label_smoothing: Label smoothing of the cross-entropy.
        constant_inputs: Whether inputs are never augmented, so that predictions are computed once.
    """

    def __init__(
        self, ensemble: Ensemble, data: Data, alpha: float, label_smoothing: PerMember, *, constant_inputs: bool
    ) -> None:
        self.ensemble, self.alpha, self.label_smoothing = ensemble, alpha, label_smoothing
        self.targets: Tensor | None = None  # (N, C + 1), see `_target`
        if constant_inputs and isinstance(data.train, Split):
            batches = evaluation_batches(data.train, CHUNK)
            self.targets = torch.cat([self._target(inputs).cpu() for inputs, _, _ in batches])

    @torch.no_grad()
    def _target(self, inputs: Tensor) -> Tensor:
        """Return p̄ and, in a last column, Σ_k p̄_k ln p̄_k: (B, ...) -> (B, C + 1)."""
        device = next((tensor.device for tensor in self.ensemble.parameters()), torch.device("cpu"))
        with ensure_eval_mode(self.ensemble):
            logits = member_logits(self.ensemble, inputs.to(device))
        if not bool(torch.isfinite(logits).all()):
            raise EnfoldError("outputs of the members must be finite, got NaN or infinity: remove diverged members")
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        log_probs = mean_log_probs(torch.log_softmax(logits, dim=-1))
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
            indices = batch.indices.cpu().flatten()
            target = self.targets.index_select(0, indices)
        else:
            target = self._target(batch.inputs.flatten(0, 1) if batch.own else batch.inputs)
        return _BatchLoss(target.to(batch.targets.device), self.alpha, self.label_smoothing)

    def __repr__(self) -> str:
        """Return the same text in every process, because it identifies the loss in checkpoints."""
        return f"EnsembleLoss({self.alpha}, {digest(self.ensemble.expand().values())[:16]})"


@dataclass(frozen=True)
class _BatchLoss:
    target: Tensor
    alpha: float
    label_smoothing: PerMember

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, (1,)."""
        logits = batch_outputs(model, batch)
        log_probs = torch.log_softmax(logits, dim=-1)
        classes, size = log_probs.shape[-1], log_probs.shape[-2]
        probs, negative_entropy = self.target[..., :classes], self.target[..., classes]
        divergence = negative_entropy.mean(-1) - (log_probs * probs).sum((-2, -1)) / size
        if self.alpha == 1:
            return divergence
        hard = cross_entropy(self.label_smoothing).of_outputs(logits, batch)
        return self.alpha * divergence + (1 - self.alpha) * hard  # (1)

    def member(self, index: int) -> _BatchLoss:
        """Return the loss of the one member."""
        return self
