"""Multi-label classification: any of L labels for each example, from one logit per label.

    p_l = sigmoid(z_l) = softmax([0, z_l])_1,   l = 1 ... L                                            (1)
    L_m = Σ_n w_n [-log p_mn(y_n)] / Σ_n w_n   over all labels n of all examples that are known         (2)

Labels are independent: a row is the two logits [0, z_l] of one label of one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.arguments import checked
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.distributions import entropy
from enfold.metrics.multilabel import UNKNOWN, MultilabelPredictions
from enfold.metrics.predictions import mean_log_probs
from enfold.metrics.weights import Weights, weighted_mean
from enfold.tasks.base import Prediction, Rows
from enfold.tasks.classification import Classification


@checked
@dataclass(frozen=True)
class Multilabel(Classification):
    """Any number of L labels for each example.

    Outputs are logits (B, L), or (B, L, H, W) for positions; targets have the same shape and are 0 and 1 in any type.
    Unknown labels are neither trained nor scored.

    Args:
        class_axis: Axis of the labels in outputs and targets.
        ignore_index: Target of unknown labels; None for -100.
        class_weights: Weights of absent and present labels, (w0, w1), in the loss; None for equal weights.
        positions: Largest number of positions of a batch that a distillation learns from, drawn at random; None for
            all.
        ignore_nan: Whether NaN in the targets stands for an unknown label; otherwise it is an error.
        num_labels: Number of labels L; None to take it from the outputs.
    """

    ignore_nan: bool = False
    num_labels: int | None = None

    name: ClassVar[str] = "multilabel"

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Multilabel:
        """Return the task with the number of labels.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if isinstance(targets, Tensor):
            self._require_targets(outputs, targets, own)
        found = outputs.shape[1:][self._label_axis()]
        if self.num_labels not in (None, found):
            raise UnsupportedOutput(
                f"num_labels must be the size of axis {self._label_axis()} of the outputs {tuple(outputs.shape[1:])}, "
                f"got {self.num_labels}: change num_labels or class_axis"
            )
        return replace(self, num_labels=found)

    def _label_axis(self) -> int:
        """Return the axis of the labels in outputs (B, ...)."""
        return 1 if self.class_axis is None else self.class_axis

    def _labels_last(self, values: Tensor, members: int) -> Tensor:
        """Return values with the axis of the labels last; `members` is 1 if there is an axis of the members."""
        axis = self._label_axis()
        return values.movedim(axis if axis < 0 else axis + members, -1)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the logits of absent and present labels, equation (1): (M, N, 2), the L labels of a position first."""
        logits = self._labels_last(outputs, 1).flatten(1)
        return torch.stack([torch.zeros_like(logits), logits], dim=-1)

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Return 0 for absent, 1 for present and -100 for unknown labels as int64, (N,) or (M, N).

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too.
        """
        self._require_targets(outputs, targets, own)
        ordered = self._labels_last(targets, int(own))
        flat = ordered.flatten(1) if own else ordered.flatten()
        unknown = flat == (UNKNOWN if self.ignore_index is None else self.ignore_index)
        if self.ignore_nan:
            unknown |= flat.isnan()
        if check:
            self._check_labels(flat[~unknown])
        return flat.masked_fill(unknown, 0).long().masked_fill(unknown, UNKNOWN)

    def _check_labels(self, labels: Tensor) -> None:
        if self.class_weights is not None and len(self.class_weights) != 2:
            raise EnfoldError(
                f"class_weights must be the weights of absent and present labels, got {len(self.class_weights)} of "
                "them: pass class_weights=(w0, w1)"
            )
        fits = (labels == 0) | (labels == 1)
        if not bool(fits.all()):
            wrong = labels[~fits][0].item()
            remedy = "pass task=Multilabel(ignore_nan=True) if it is unknown" if wrong != wrong else "convert them"
            raise EnfoldError(f"targets must be 0 or 1 for task='multilabel', got {wrong:g}: {remedy}")

    def _require_targets(self, outputs: Tensor, targets: Tensor, own: bool) -> None:
        given, expected = tuple(targets.shape[1:] if own else targets.shape), tuple(outputs.shape[1:])
        if given != expected or len(expected) < 2:
            raise UnsupportedOutput(
                f"task='multilabel' needs outputs and targets of one shape (B, L), one logit per label, got outputs of "
                f'shape {expected} and targets of shape {given}: change the targets, or pass task="classification" for '
                'class indices, task="binary" for a single label'
            )

    def ignore_mask(self, targets: Tensor) -> Tensor:
        """Return the unknown labels."""
        return targets == UNKNOWN

    def _leave_out(self, rows: Rows, own: bool) -> Rows:
        """Give unknown labels the weight 0: all rows are needed to know to which label a row belongs."""
        unknown = self.ignore_mask(rows.targets)
        if not bool(unknown.any()):
            return rows
        if bool(unknown.all()):
            raise EnfoldError(
                "a batch must have a label that is known, got none: drop such batches, or check ignore_index"
            )
        weights = torch.ones_like(unknown, dtype=rows.values.dtype) if rows.weights is None else rows.weights
        return replace(rows, weights=weights * ~unknown)

    def row_weights(self, targets: Tensor) -> Tensor | None:
        """Return the weights of absent and present labels."""
        return super().row_weights(targets.clamp(min=0))

    def row_losses(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return the loss of each label in equation (2); label smoothing moves targets towards 1/2."""
        return super().row_losses(replace(rows, targets=rows.targets.clamp(min=0)), smoothing)

    def mean_logits(self, outputs: Tensor, weights: Weights = None) -> Tensor:
        """Return the logits of one network with the mean probabilities of the members: (M, B, ...) -> (B, ...)."""
        logits = outputs.float()
        return mean_log_probs(F.logsigmoid(logits), weights) - mean_log_probs(F.logsigmoid(-logits), weights)

    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Return the probability of every label, in the shape of the outputs, and the entropy of each."""
        logits = outputs.float()
        both = torch.log_softmax(torch.stack([torch.zeros_like(logits), logits], dim=-1), dim=-1)
        mean = mean_log_probs(both, weights)
        total, aleatoric = entropy(mean).clamp(min=0.0), weighted_mean(entropy(both), weights)
        epistemic = (total - aleatoric).clamp(min=0.0)
        return Prediction(mean[..., 1].exp(), both[..., 1].exp(), total, aleatoric, epistemic, class_axis=None)

    def predictions(self, rows: Rows) -> MultilabelPredictions:
        """Return log-probabilities and targets of all labels."""
        if self.num_labels is None:
            raise EnfoldError("num_labels must be known for metrics, got None: pass task=Multilabel(num_labels=)")
        log_probs = torch.log_softmax(rows.values.float(), dim=-1).cpu()
        return MultilabelPredictions(log_probs, rows.targets.cpu(), self.num_labels)
