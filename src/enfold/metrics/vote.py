"""Majority votes of the members."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from enfold.metrics.distributions import class_labels, ensemble_log_probs, member_log_probs
from enfold.metrics.predictions import Predictions
from enfold.metrics.weights import weighted_mean


def majority_vote(p: Predictions) -> Tensor:
    """Return the class that most members predict (N,), or of the largest weight; the mean probabilities decide ties.

    Args:
        p: Predictions of the members.
    """
    each = F.one_hot(member_log_probs(p).argmax(-1), p.num_classes)  # (M, N, C)
    votes = each.sum(0) if p.weights is None else weighted_mean(each.double(), p.weights)
    tied = votes == votes.amax(-1, keepdim=True)
    return ensemble_log_probs(p).masked_fill(~tied, -float("inf")).argmax(-1)


def vote_accuracy(p: Predictions) -> float:
    """Return the accuracy of the majority vote.

    Args:
        p: Predictions of the members.
    """
    return (majority_vote(p) == class_labels(p)).double().mean().item()
