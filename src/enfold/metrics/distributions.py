"""What every metric starts from: predictions as categorical distributions in float64, with 0 log 0 = 0.

Everything is moved to the CPU: sums over many examples need float64, which some devices lack, and the same
predictions give the same figures wherever they were made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions, mean_log_probs


def member_log_probs(p: Predictions) -> Tensor:
    """The members in float64 (M, N, C), normalised anew: rows of float32 sum to 1 within 1e-7 only."""
    if 0 in p.log_probs.shape:
        raise EnfoldError(
            f"a metric needs at least one member, example and class, got {tuple(p.log_probs.shape)}: "
            "look for an empty split or an empty choice of members"
        )
    return p.log_probs.detach().to("cpu", torch.float64).log_softmax(-1)


def ensemble_log_probs(p: Predictions) -> Tensor:
    """The log of the members' mean probabilities in float64 (N, C); for M = 1 the network's own."""
    return mean_log_probs(member_log_probs(p))


def class_labels(p: Predictions) -> Tensor:
    """The labels as int64 class indices (N,)."""
    labels = p.labels.detach().cpu()
    if labels.is_floating_point() or labels.is_complex():
        raise EnfoldError(f"labels must be class indices, got the type {labels.dtype}: pass labels.long()")
    labels = labels.long()
    wrong = labels[(labels < 0) | (labels >= p.num_classes)]
    if len(wrong):
        raise EnfoldError(
            f"labels must be class indices from 0 to {p.num_classes - 1}, got {int(wrong[0])}: "
            "leave out unlabelled examples or give the network one output a class"
        )
    return labels


def of_label(log_probs: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each example's label: (..., N, C) -> (..., N)."""
    return log_probs.gather(-1, labels.expand(log_probs.shape[:-1])[..., None])[..., 0]


def expected(probs: Tensor, values: Tensor) -> Tensor:
    """Σ_c probs_c values_c over the last axis; what has no probability counts nothing, even if infinite."""
    return torch.where(probs > 0, probs * values, 0.0).sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """H[p] = -Σ_c p_c log p_c in nats: (..., C) -> (...)."""
    return -expected(log_probs.exp(), log_probs)


def several_members(p: Predictions, measure: str) -> None:
    """Refuse a single network where members are compared with one another."""
    if p.num_members < 2:
        raise EnfoldError(
            f"{measure} compares members with one another and needs at least 2, got {p.num_members}: "
            "pass the predictions of all members, before Predictions.mean()"
        )
