"""Predictions as categorical distributions in float64, with 0 log 0 = 0.

All metrics are computed on the CPU: sums over many examples need float64, which some devices lack, and the results do
not depend on the device. Predictions for the pixels of many images are converted in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions, RowPredictions, mean_log_probs

AT_ONCE = 4_000_000  # log-probabilities per block: limits the memory of a copy in float64 to 32 MB


def member_log_probs(p: Predictions) -> Tensor:
    """Return the members' log-probabilities in float64 (M, N, C), normalized again in that precision.

    Raises:
        EnfoldError: If there are no members, examples or classes.
    """
    if 0 in p.log_probs.shape:
        raise EnfoldError(
            f"log_probs must have at least one member, example and class, got shape {tuple(p.log_probs.shape)}: "
            "check for an empty split or an empty selection of members"
        )
    return p.log_probs.detach().to("cpu", torch.float64).log_softmax(-1)


def ensemble_log_probs(p: Predictions) -> Tensor:
    """Return the log of the members' mean probabilities in float64 (N, C)."""
    return _map_blocks(p, p.labels, lambda members, _: mean_log_probs(members, p.weights))


def by_blocks(p: Predictions, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a value for each example (N, ...), from blocks of examples.

    Args:
        p: Predictions.
        function: Function of the members' log-probabilities in float64 (M, n, C) and of the labels (n,).
    """
    return _map_blocks(p, class_labels(p), function)


def _map_blocks(p: Predictions, labels: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    M, N, C = p.log_probs.shape
    size = max(1, AT_ONCE // max(1, M * C))
    if size >= N:
        return function(member_log_probs(p), labels)
    blocks = zip(p.log_probs.split(size, dim=1), labels.split(size), strict=True)
    return torch.cat([function(part.detach().to("cpu", torch.float64).log_softmax(-1), own) for part, own in blocks])


def class_labels(p: Predictions) -> Tensor:
    """Return the labels as int64 class indices (N,).

    Raises:
        EnfoldError: If a label is not a class index.
    """
    labels = p.labels.detach().cpu()
    if labels.is_floating_point() or labels.is_complex():
        raise EnfoldError(f"labels must be integer class indices, got {labels.dtype}: pass labels.long()")
    labels = labels.long()
    wrong = labels[(labels < 0) | (labels >= p.num_classes)]
    if len(wrong):
        raise EnfoldError(
            f"labels must be class indices from 0 to {p.num_classes - 1}, got {int(wrong[0])}: "
            "remove unlabelled examples or use a network with one output per class"
        )
    return labels


def of_label(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each example's label: (..., N, C) -> (..., N)."""
    return log_probs.gather(-1, labels.expand(log_probs.shape[:-1])[..., None])[..., 0]


def expectation(probs: Tensor, values: Tensor) -> Tensor:
    """Return Σ_c probs_c values_c over the last axis; terms of probability 0 are 0, even for infinite values."""
    return torch.where(probs > 0, probs * values, 0.0).sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy H[p] = -Σ_c p_c log p_c in nats: (..., C) -> (...)."""
    return -expectation(log_probs.exp(), log_probs)


def require_members(p: RowPredictions, measure: str) -> None:
    """Check that there are at least two members to compare.

    Args:
        p: Predictions.
        measure: Name of the metric in the error message.

    Raises:
        EnfoldError: If there is only one member.
    """
    if p.num_members < 2:
        raise EnfoldError(
            f"{measure} compares members and needs at least 2, got {p.num_members}: "
            "pass the predictions of all members, before Predictions.mean()"
        )
