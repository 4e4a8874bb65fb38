"""Exact identities of averaging: squared error, log-loss and votes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, member_log_probs, of_label
from enfold.metrics.predictions import Predictions, mean_log_probs
from enfold.metrics.weights import weighted_mean


@dataclass(frozen=True)
class Ambiguity:
    """ensemble = members - ambiguity, at every point.

    Args:
        ensemble: Squared error of the mean prediction.
        members: Mean squared error of the members.
        ambiguity: Mean squared difference of the members from their mean.
    """

    ensemble: Tensor  # (f̄ - y)²
    members: Tensor  # (1/M) Σ_m (f_m - y)²
    ambiguity: Tensor  # (1/M) Σ_m (f_m - f̄)²


def ambiguity_decomposition(outputs: Tensor, target: Tensor) -> Ambiguity:
    """Return the ambiguity decomposition (f̄ - y)² = (1/M) Σ_m (f_m - y)² - (1/M) Σ_m (f_m - f̄)².

    Krogh, Vedelsby, "Neural network ensembles, cross validation, and active learning", NeurIPS 1994.

    Args:
        outputs: Outputs of the members (M, ...).
        target: Targets (...).
    """
    outputs, target = outputs.double(), target.double()
    mean = outputs.mean(0)
    return Ambiguity(
        ensemble=(mean - target).square(),
        members=(outputs - target).square().mean(0),
        ambiguity=(outputs - mean).square().mean(0),
    )


@dataclass(frozen=True)
class BiasVarianceCovariance:
    """error = bias² + variance / M + (1 - 1/M) covariance, at every point.

    Args:
        error: Expected squared error of the mean prediction.
        bias: Mean bias of the members.
        variance: Mean variance of the members.
        covariance: Mean covariance of two members.
    """

    error: Tensor  # E[(f̄ - y)²]
    bias: Tensor  # (1/M) Σ_i (E f_i - y)
    variance: Tensor  # (1/M) Σ_i Var f_i
    covariance: Tensor  # 1/(M (M - 1)) Σ_{i≠j} Cov(f_i, f_j); 0 for M = 1


def bias_variance_covariance(draws: Tensor, target: Tensor) -> BiasVarianceCovariance:
    """Return the decomposition of the expected squared error of M averaged members over S training runs.

    E is the mean over the S runs, and Var and Cov divide by S, so that the identity is exact for any S.
    Ueda, Nakano, "Generalization error of ensemble estimators", ICNN 1996.

    Args:
        draws: Outputs (S, M, ...).
        target: Targets (...).
    """
    draws, target = draws.double(), target.double()
    M = draws.shape[1]
    centred = draws - draws.mean(0)
    variance = centred.square().mean(0)  # (M, ...)
    of_sum = centred.sum(1).square().mean(0)  # Var Σ_i f_i = Σ_i Var f_i + Σ_{i≠j} Cov(f_i, f_j)
    return BiasVarianceCovariance(
        error=(draws.mean(1) - target).square().mean(0),
        bias=draws.mean((0, 1)) - target,
        variance=variance.mean(0),
        covariance=(of_sum - variance.sum(0)) / max(1, M * (M - 1)),
    )


def jensen_gap(p: Predictions) -> Tensor:
    """Return (1/M) Σ_m -log p_m(y) + log p̄(y) of each example (N,): the mean member's NLL minus the ensemble's.

    With weights of the members, means are weighted. It is non-negative; infinite if the label has probability 0 for
    some but not all members, and 0 if for all.

    Args:
        p: Predictions of the members.
    """
    own = of_label(member_log_probs(p), class_labels(p))  # (M, N)
    mean = mean_log_probs(own, p.weights)
    gap = mean - weighted_mean(own, p.weights)
    return torch.where(mean.isinf(), 0.0, gap).clamp(min=0.0)


def majority_vote_accuracy(num_members: int, error: float) -> float:
    """Return the probability that the majority of M independent voters is correct; ties are decided at random.

    Args:
        num_members: Number of voters M.
        error: Error rate of each voter.

    Raises:
        EnfoldError: If an argument is out of range.
    """
    from scipy.special import bdtrc  # imported here: it takes a quarter of a second

    if num_members < 1 or not 0 <= error <= 1:
        raise EnfoldError(
            f"num_members must be at least 1 and error from 0 to 1, got num_members={num_members} and error={error}: "
            "pass the error as a fraction"
        )
    half = num_members // 2
    more_than_half = float(bdtrc(half, num_members, 1 - error))
    if num_members % 2:
        return more_than_half
    return (more_than_half + float(bdtrc(half - 1, num_members, 1 - error))) / 2  # half of the ties


def left_out_fraction(examples: int) -> float:
    """Return the probability (1 - 1/N)^N, about 1/e, that a bootstrap sample of N examples lacks a given one.

    Args:
        examples: N, the number of examples.

    Raises:
        EnfoldError: If `examples` is below 1.
    """
    if examples < 1:
        raise EnfoldError(f"examples must be at least 1, got {examples}: pass the size of the training set")
    return float((1 - 1 / examples) ** examples)
