"""Classification: one of C classes, for each example, each position of an image or each token of a sequence.

    p_m = softmax(z_m),   p̄ = (1/M) Σ_m p_m                                                            (1)
    L_m = Σ_n w_n [-(1 - s) log p_mn(y_n) - s mean_c log p_mn(c)] / Σ_n w_n                            (2)

with label smoothing s and weights w_n of classes and examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.arguments import checked
from enfold.data.dataset import class_labels
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.distributions import entropy
from enfold.metrics.predictions import DensePredictions, Predictions, mean_log_probs
from enfold.metrics.weights import Weights, weighted_mean
from enfold.tasks.base import Prediction, Rows, Task

IGNORED = -100  # as in torch.nn.functional.cross_entropy


@checked
@dataclass(frozen=True)
class Classification(Task):
    """One of C classes for each example, or for each position of dense outputs and token sequences.

    Args:
        class_axis: Axis of the classes in the outputs (B, ...) of a network: 1 for (B, C, H, W), -1 for tokens
            (B, T, C); None to infer it from the shape of the targets.
        ignore_index: Target of positions that are neither trained nor scored; None for -100 if an example has several
            targets, and for no such target if it has one.
        class_weights: Weight of each class in the loss; None for equal weights.
        positions: Largest number of positions of a batch that a distillation learns from, drawn at random; None for
            all.
    """

    class_axis: int | None = None
    ignore_index: int | None = None
    class_weights: tuple[float, ...] | None = None
    positions: int | None = None

    name: ClassVar[str] = "classification"

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Classification:
        """Return the task with the axis of the classes.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if outputs.ndim <= 3:
            return replace(self, class_axis=None)
        if self.class_axis is not None or not isinstance(targets, Tensor):
            return self
        wanted = tuple(targets.shape[1:] if own else targets.shape)  # (B, ...)
        axes = [axis for axis in (1, -1) if _without(outputs.shape[1:], axis) == wanted]
        if len(axes) == 1:
            return replace(self, class_axis=axes[0])
        given = f"outputs of shape {tuple(outputs.shape[1:])} and targets of shape {wanted}"
        if axes:
            raise EnfoldError(
                f"class_axis must be given where the shapes leave it open, got {given}: pass "
                "task=Classification(class_axis=1) or task=Classification(class_axis=-1)"
            )
        raise UnsupportedOutput(
            f"targets must have the shape of the outputs without the axis of the classes, got {given}: change the "
            'targets, or pass task="regression" or task="multilabel"'
        )

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the logits with the axis of the classes last: (M, N, C)."""
        logits = self._logits(outputs)
        return logits if logits.ndim == 3 else logits.flatten(1, -2)

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return the logits (M, B, ..., C)."""
        axis = self._axis(outputs)
        if outputs.ndim < 3 or outputs.shape[axis] < 2:
            raise UnsupportedOutput(
                f"classification needs the logits of at least 2 classes from each member, (members, batch, classes), "
                f'got outputs of shape {tuple(outputs.shape)}: pass task="binary" or task="regression" if that is what '
                "they are, or use a network with such logits"
            )
        return outputs.movedim(axis, -1) if outputs.ndim > 3 else outputs

    def _axis(self, outputs: Tensor) -> int:
        """Return the axis of the classes in outputs with a member axis."""
        if outputs.ndim <= 3:
            return -1
        if self.class_axis is None:
            raise UnsupportedOutput(
                f"class_axis must be given for outputs with several axes, got outputs of shape "
                f"{tuple(outputs.shape)} (members, batch, ...): pass task=Classification(class_axis=1)"
            )
        return self.class_axis if self.class_axis < 0 else self.class_axis + 1

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Return class indices (N,) or (M, N).

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too.
        """
        expected = _without(outputs.shape[1:], self._axis(outputs[:1]) - (self._axis(outputs) > 0))
        given = tuple(targets.shape[1:] if own else targets.shape)
        if given != expected:
            raise EnfoldError(
                f"targets must be one class index per row of the outputs, got targets of shape {given} for outputs of "
                f"shape {tuple(outputs.shape[1:])}: pass class indices of shape {expected}, or name the task with task="
            )
        flat = targets.reshape(len(targets), -1) if own else targets.reshape(-1)
        if not check:
            return flat
        ignored = self._ignore_mask(flat, outputs.ndim > 3)
        self.check(flat if ignored is None else flat[~ignored], outputs.shape[self._axis(outputs)])
        return flat.long()

    def check(self, labels: Tensor, num_classes: int) -> Tensor:
        """Return labels as int64 if they are class indices, and refuse class weights for other classes."""
        if self.class_weights is not None and len(self.class_weights) != num_classes:
            raise EnfoldError(
                f"class_weights must have one weight for each of the {num_classes} classes, got "
                f"{len(self.class_weights)}: change class_weights"
            )
        return class_labels(labels, num_classes, "a batch")

    def ignore_mask(self, targets: Tensor) -> Tensor | None:
        """Return the positions with `ignore_index`."""
        return self._ignore_mask(targets, self.class_axis is not None)

    def _ignore_mask(self, targets: Tensor, is_dense: bool) -> Tensor | None:
        index = self.ignore_index if self.ignore_index is not None else IGNORED if is_dense else None
        return None if index is None or targets.is_floating_point() else targets == index

    def row_weights(self, targets: Tensor) -> Tensor | None:
        """Return the weights of the classes of the targets."""
        if self.class_weights is None:
            return None
        weights = torch.tensor(self.class_weights, device=targets.device)
        return weights[targets.clamp(0, len(weights) - 1)]

    def loss(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return equation (2)."""
        if rows.weights is not None:
            return super().loss(rows, smoothing)
        # Means first: the cross-entropy with the uniform distribution then needs one number for each member.
        log_probs = torch.log_softmax(rows.values, dim=-1)
        own, factor = self._nll(log_probs, rows.targets).mean(1), _factor(smoothing, log_probs)
        return own if not bool(factor.any()) else (1 - factor) * own + factor * -log_probs.mean(dim=(1, 2))

    def row_losses(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return the term of each row in the sum of equation (2)."""
        log_probs = torch.log_softmax(rows.values, dim=-1)
        own, factor = self._nll(log_probs, rows.targets), _factor(smoothing, log_probs)
        if not bool(factor.any()):
            return own
        factor = factor[:, None] if factor.ndim else factor
        return (1 - factor) * own - factor * log_probs.mean(-1)

    def _nll(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(y), (M, N)."""
        members, size, _ = log_probs.shape
        target = targets.expand(members, size).reshape(-1)
        return F.nll_loss(log_probs.flatten(0, 1), target, reduction="none").view(members, size)

    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Return probabilities in the shape of the outputs, and entropies of every prediction."""
        axis = self._axis(outputs)
        return self._predict(self._logits(outputs), axis if axis < 0 else axis - 1, weights)

    def _predict(self, logits: Tensor, class_axis: int, weights: Weights) -> Prediction:
        """Return the prediction of logits (M, B, ..., C), with the classes at `class_axis` of one network."""
        members = torch.log_softmax(logits.float(), dim=-1)
        mean = mean_log_probs(members, weights)
        total = entropy(mean).clamp(min=0.0)
        aleatoric = weighted_mean(entropy(members), weights)
        epistemic = (total - aleatoric).clamp(min=0.0)
        probs = mean.exp().movedim(-1, class_axis)
        each = members.exp().movedim(-1, class_axis if class_axis < 0 else class_axis + 1)
        return Prediction(probs, each, total, aleatoric, epistemic, class_axis)

    def mean_logits(self, outputs: Tensor, weights: Weights = None) -> Tensor:
        """Return outputs of one network with the mean probabilities of the members: (M, B, ...) -> (B, ...)."""
        axis = self._axis(outputs)
        return mean_log_probs(torch.log_softmax(outputs.float(), dim=axis), weights)

    def predictions(self, rows: Rows) -> Predictions:
        """Return log-probabilities and labels; `class_axis` is that of outputs with positions."""
        kind = Predictions if self.class_axis is None else DensePredictions
        return kind(torch.log_softmax(rows.values.float(), dim=-1).cpu(), rows.targets.cpu())


def _factor(smoothing: float | Sequence[float], like: Tensor) -> Tensor:
    return torch.as_tensor(smoothing, dtype=like.dtype, device=like.device)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return a shape without one axis."""
    kept = list(shape)
    del kept[axis]
    return tuple(kept)
