"""Metrics of dense classification: overlap of predicted and true regions, from rows of positions.

With TP, FP and FN the counts of a class over all positions that are not ignored:

    IoU_c = TP / (TP + FP + FN),   Dice_c = 2 TP / (2 TP + FP + FN)                                    (1)

`mean_iou` and `dice` are means over the classes that are present, in the targets or in the predictions. Counts are
added over all images before the division, as in the benchmarks of segmentation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.metrics.distributions import class_labels
from enfold.metrics.predictions import Predictions, mean_log_probs

_AT_ONCE = 2_000_000  # log-probabilities per block: limits the memory beside the predictions to about 50 MB


def confusion(p: Predictions) -> Tensor:
    """Return how many positions of each class (first axis) are predicted as each class (second axis), (C, C).

    Args:
        p: Predictions of the members.
    """
    C, labels = p.num_classes, class_labels(p)
    counts = torch.zeros(C * C, dtype=torch.long)
    for start in range(0, len(p), max(1, _AT_ONCE // (p.num_members * C))):
        rows = slice(start, start + max(1, _AT_ONCE // (p.num_members * C)))
        predicted = mean_log_probs(p.log_probs[:, rows].to("cpu", torch.float64), p.weights).argmax(-1)
        counts += torch.bincount(labels[rows] * C + predicted, minlength=C * C)
    return counts.view(C, C)


def class_iou(p: Predictions) -> Tensor:
    """Return the intersection over union of every class (C,), equation (1); NaN for classes that are not present.

    Args:
        p: Predictions of the members.
    """
    true, union = _overlap(p)
    return true / union


def class_dice(p: Predictions) -> Tensor:
    """Return the Dice coefficient of every class (C,), equation (1); NaN for classes that are not present.

    Args:
        p: Predictions of the members.
    """
    true, union = _overlap(p)
    return 2 * true / (true + union)


def mean_iou(p: Predictions) -> float:
    """Return the intersection over union, mean over the classes that are present.

    Args:
        p: Predictions of the members.
    """
    return class_iou(p).nanmean().item()


def dice(p: Predictions) -> float:
    """Return the Dice coefficient, mean over the classes that are present.

    Args:
        p: Predictions of the members.
    """
    return class_dice(p).nanmean().item()


def _overlap(p: Predictions) -> tuple[Tensor, Tensor]:
    """Return TP and TP + FP + FN of every class, (C,)."""
    counts = confusion(p).double()
    true = counts.diagonal()
    return true, counts.sum(0) + counts.sum(1) - true
