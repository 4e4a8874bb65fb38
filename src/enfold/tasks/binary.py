"""Binary classification with one logit, for each example or each position.

    p = sigmoid(z) = softmax([0, z])_1                                                                 (1)

so that a row is the two logits [0, z], and losses, distillation and metrics of classes apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.arguments import checked
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.predictions import mean_log_probs
from enfold.metrics.weights import Weights
from enfold.tasks.base import Prediction
from enfold.tasks.classification import IGNORED, Classification


@checked
@dataclass(frozen=True)
class Binary(Classification):
    """One of two classes from one logit for each example, or for each position of dense outputs.

    Outputs are (B,) or (B, 1), or for positions (B, 1, H, W), (B, H, W) or (B, T, 1). Targets have the same shape apart
    from axes of size 1, and are 0 and 1 in any type.

    Args:
        class_axis: Axis of the two probabilities in predictions; None for the axis of size 1 in the outputs, or, if
            there is none, for -1 with outputs (B, T) and for 1 with outputs (B, H, W).
        ignore_index: Target of positions that are neither trained nor scored; None for -100 if an example has several
            targets, and for no such target if it has one.
        class_weights: Weights of the classes 0 and 1 in the loss; None for equal weights.
        positions: Largest number of positions of a batch that a distillation learns from, drawn at random; None for
            all.
    """

    name: ClassVar[str] = "binary"

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Binary:
        """Return the task with the axis of the classes, which is None for one logit per example.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if isinstance(targets, Tensor):
            self._require_targets(outputs, targets, own)
        return replace(self, class_axis=self._class_axis(outputs) if _is_dense(outputs) else None)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the logits of both classes, equation (1): (M, N, 2)."""
        return _two_logits(outputs.flatten(1), -1)

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of both classes, last: (M, B, ..., 2)."""
        axis = self._class_axis(outputs)
        place = axis if axis < 0 else axis + 1
        if outputs.ndim == 2 or outputs.shape[place] != 1:
            return _two_logits(outputs, -1)
        return _two_logits(outputs.squeeze(place), -1)

    def _class_axis(self, outputs: Tensor) -> int:
        """Return the axis of the classes in the predictions of one network."""
        shape = outputs.shape[1:]
        if self.class_axis is not None:
            return self.class_axis
        if len(shape) <= 2 or (shape[1] != 1 and shape[-1] == 1):
            return -1
        return 1

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Return the classes 0 and 1 as int64, (N,) or (M, N).

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too.
        """
        self._require_targets(outputs, targets, own)
        flat = targets.flatten(1) if own else targets.flatten()
        if check:
            self.check_labels(flat, IGNORED if self.ignore_index is None else self.ignore_index, _is_dense(outputs))
        return flat.long()

    def check_labels(self, labels: Tensor, ignored: int, may_ignore: bool) -> None:
        """Refuse class weights of more than two classes and labels that are neither 0, 1 nor ignored.

        Args:
            labels: The labels of all rows.
            ignored: The label to ignore.
            may_ignore: Whether the label to ignore may occur.
        """
        if self.class_weights is not None and len(self.class_weights) != 2:
            raise EnfoldError(
                f"class_weights must be the weights of the classes 0 and 1, got {len(self.class_weights)} of them: "
                "pass class_weights=(w0, w1)"
            )
        fits = (labels == 0) | (labels == 1)
        if may_ignore or self.ignore_index is not None:
            fits |= labels == ignored
        if not bool(fits.all()):
            wrong = labels[~fits][0].item()
            raise EnfoldError(
                f"targets must be 0 or 1 for task='{self.name}', got {wrong:g}: convert them, or pass another task="
            )

    def _require_targets(self, outputs: Tensor, targets: Tensor, own: bool) -> None:
        given, expected = tuple(targets.shape[1:] if own else targets.shape), tuple(outputs.shape[1:])
        if not is_same(given, expected):
            hint = 'pass task="classification" for two logits' if expected[-1:] == (2,) else "change the targets"
            raise UnsupportedOutput(
                f"task='{self.name}' needs one logit per target, got outputs of shape {expected} and targets of shape "
                f"{given}: {hint}"
            )

    def mean_logits(self, outputs: Tensor, weights: Weights = None) -> Tensor:
        """Return the logits of one network with the mean probabilities of the members: (M, B, ...) -> (B, ...)."""
        logits = outputs.float()
        return mean_log_probs(F.logsigmoid(logits), weights) - mean_log_probs(F.logsigmoid(-logits), weights)

    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Return the probabilities of both classes: (B, 2), or for positions (B, 2, H, W) or (B, T, 2)."""
        return self._predict(self._logits(outputs), self._class_axis(outputs), weights)


def is_same(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether two shapes are the same apart from axes of size 1; the first axis is that of the batch."""
    return first[:1] == second[:1] and [n for n in first[1:] if n != 1] == [n for n in second[1:] if n != 1]


def _is_dense(outputs: Tensor) -> bool:
    """Return whether a network (B, ...) has an axis of positions."""
    return outputs.ndim > 3 or (outputs.ndim == 3 and outputs.shape[2] != 1)


def _two_logits(logits: Tensor, axis: int) -> Tensor:
    """Return the logits of both classes along a new axis, equation (1)."""
    return torch.stack([torch.zeros_like(logits), logits], dim=axis)
