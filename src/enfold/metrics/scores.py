"""Scores of the mean of the members' probabilities, or of a single network if M = 1.

A score is the mean over examples of its ``example_...`` function. Accuracies are fractions; NLL is in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import by_blocks, of_label
from enfold.metrics.predictions import Predictions, RowPredictions, mean_log_probs


def example_rank(p: Predictions) -> Tensor:
    """Return the number of classes ranked before the label (N,); of equally probable classes the lowest is first.

    Args:
        p: Predictions of the members.
    """

    def rank(members: Tensor, labels: Tensor) -> Tensor:
        log_probs = mean_log_probs(members, p.weights)  # (N, C)
        own = of_label(log_probs, labels)[:, None]
        earlier = torch.arange(p.num_classes) < labels[:, None]
        return ((log_probs > own) | ((log_probs == own) & earlier)).sum(-1)

    return by_blocks(p, rank)


def example_correct(p: Predictions) -> Tensor:
    """Return 1 where the most probable class is the label, else 0 (N,).

    Args:
        p: Predictions of the members.
    """
    return (example_rank(p) == 0).double()


def example_nll(p: Predictions) -> Tensor:
    """Return -log p̄(y) (N,); infinite where the label has probability 0.

    Args:
        p: Predictions of the members.
    """
    return by_blocks(p, lambda members, labels: of_label(mean_log_probs(members, p.weights), labels).abs())


def example_brier(p: Predictions) -> Tensor:
    """Return Σ_c (p̄_c - 1[y = c])² (N,), from 0 to 2.

    Args:
        p: Predictions of the members.
    """

    def distance(members: Tensor, labels: Tensor) -> Tensor:
        probs = mean_log_probs(members, p.weights).exp()
        return (probs - torch.nn.functional.one_hot(labels, p.num_classes)).square().sum(-1)

    return by_blocks(p, distance)


def accuracy(p: Predictions) -> float:
    """Return the fraction of examples whose most probable class is the label; ties go to the lowest index.

    Args:
        p: Predictions of the members.
    """
    return example_correct(p).mean().item()


def top_k_accuracy(p: Predictions, k: int = 5) -> float:
    """Return the fraction of examples whose label is among the k most probable classes; ties as in `accuracy`.

    Args:
        p: Predictions of the members.
        k: Number of classes.

    Raises:
        EnfoldError: If `k` is not between 1 and the number of classes.
    """
    if not 1 <= k <= p.num_classes:
        raise EnfoldError(f"k must be from 1 to the number of classes {p.num_classes}, got {k}: change k")
    return (example_rank(p) < k).double().mean().item()


def nll(p: Predictions) -> float:
    """Return the negative log-likelihood of the labels under the mean probabilities, -(1/N) Σ_n log p̄_n(y_n).

    Args:
        p: Predictions of the members.
    """
    return example_nll(p).mean().item()


def gibbs_nll(p: Predictions) -> float:
    """Return the mean of the members' negative log-likelihoods; without weights, it is at least `nll`.

    Args:
        p: Predictions of the members.
    """
    return by_blocks(p, lambda members, labels: of_label(members, labels).abs().T).T.mean().item()


def brier(p: Predictions) -> float:
    """Return the Brier score summed over classes, (1/N) Σ_n Σ_c (p̄_nc - 1[y_n = c])², from 0 to 2.

    Args:
        p: Predictions of the members.
    """
    return example_brier(p).mean().item()


def per_member(metric: Callable[[Any], float | Tensor], p: RowPredictions) -> Tensor:
    """Return a metric of each member: (M,) for a scalar metric, (M, N) for a score of each example.

    Args:
        metric: Function of predictions.
        p: Predictions of the members.
    """
    values = [torch.as_tensor(metric(p.member(m)), dtype=torch.float64) for m in range(p.num_members)]
    return torch.stack(values)


def mean_member(metric: Callable[[Any], float], p: RowPredictions) -> float:
    """Return the mean over members of a metric of each member.

    Args:
        metric: Function of predictions.
        p: Predictions of the members.
    """
    return per_member(metric, p).mean().item()
