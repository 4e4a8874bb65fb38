"""Diversity of the members' predictions.

Pairwise measures are means over the pairs i < j of distinct members (i != j if the order matters), not over all M²
pairs, so that they are comparable between ensembles of different size. Weights of the members do not count
in them; they do in the variances of Masegosa and Bregman.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, member_log_probs, of_label, require_members
from enfold.metrics.predictions import Predictions
from enfold.metrics.scores import accuracy, example_correct, per_member
from enfold.metrics.uncertainty import decomposition
from enfold.metrics.weights import weighted_mean

Normaliser = Literal["sample", "member", "ensemble"]


def disagreement_matrix(p: Predictions) -> Tensor:
    """Return the fraction of examples for which members i and j predict different classes (M, M).

    Args:
        p: Predictions of the members.
    """
    require_members(p, "disagreement")
    predicted = member_log_probs(p).argmax(-1)  # (M, N)
    return torch.stack([(predicted != one).double().mean(1) for one in predicted])


def disagreement(p: Predictions) -> float:
    """Return the fraction of examples for which two members predict different classes, mean over pairs.

    Args:
        p: Predictions of the members.
    """
    return _pairs(disagreement_matrix(p)).mean().item()


def agreement(p: Predictions) -> float:
    """Return the fraction of examples for which two members predict the same class, mean over pairs.

    Args:
        p: Predictions of the members.
    """
    return 1.0 - disagreement(p)


def normalised_disagreement(p: Predictions, normaliser: Normaliser = "member") -> float:
    """Return the disagreement divided by an error rate, as inaccurate members disagree without being diverse.

    It is 0 without disagreement, and infinite for disagreement without errors.

    Args:
        p: Predictions of the ensemble.
        normaliser: The error rate to divide by:

            - "member": for each pair the error of either of the two members, mean of both;
            - "sample": disagreement of each member with member 0, divided by that member's error, as in the
              diversity-accuracy plane of Fort, Hu, Lakshminarayanan, 2019, arXiv 1912.02757;
            - "ensemble": the mean disagreement divided by the error of the ensemble.

    Raises:
        EnfoldError: If `normaliser` is unknown or there is only one member.
    """
    if normaliser not in get_args(Normaliser):
        raise EnfoldError(f"normaliser must be one of {get_args(Normaliser)}, got {normaliser!r}: choose one of these")
    matrix = disagreement_matrix(p)
    if normaliser == "ensemble":
        return _ratio(_pairs(matrix).mean(), torch.tensor(1.0 - accuracy(p), dtype=torch.float64)).item()
    scaled = _ratio(matrix, 1.0 - per_member(accuracy, p))  # [i, j]: divided by the error of j
    if normaliser == "sample":
        return scaled[0, 1:].mean().item()
    return _pairs((scaled + scaled.T) / 2).mean().item()


def pairwise_kl(p: Predictions) -> float:
    """Return KL(p_i ‖ p_j) in nats, mean over ordered pairs i != j and examples; infinite if supports differ.

    Args:
        p: Predictions of the members.
    """
    require_members(p, "pairwise_kl")
    M = p.num_members
    return decomposition(p.with_weights(None)).epkl.mean().item() * M / (M - 1)  # EPKL also counts the M pairs i = j


def cosine_similarity(p: Predictions) -> float:
    """Return the cosine similarity of two members' probability vectors, mean over pairs and examples.

    Args:
        p: Predictions of the members.
    """
    require_members(p, "cosine_similarity")
    directions = torch.nn.functional.normalize(member_log_probs(p).exp(), dim=-1)  # (M, N, C)
    M = p.num_members
    ordered_pairs = directions.sum(0).square().sum(-1) - M  # Σ_{i≠j} u_i·u_j = |Σ u|² - Σ |u|²
    return ordered_pairs.mean().item() / (M * (M - 1))


def cka(p: Predictions) -> float:
    """Return the centred kernel alignment of two members' logits over the examples, mean over pairs.

    It uses logits minus their mean over classes, which log-probabilities determine. Pairs with a member that predicts
    the same for every example are ignored; NaN if no pair is left.

    Args:
        p: Predictions of the members.

    Raises:
        EnfoldError: If a probability is 0 or there is only one member.
    """
    require_members(p, "cka")
    logits = member_log_probs(p)
    if not bool(logits.isfinite().all()):
        raise EnfoldError(
            "log_probs must be finite for cka, got classes of probability 0: smooth the predictions or use "
            "cosine_similarity"
        )
    logits = logits - logits.mean(-1, keepdim=True)
    pairs = [linear_cka(logits[i], logits[j]) for i in range(len(logits)) for j in range(i)]
    return torch.tensor(pairs, dtype=torch.float64).nanmean().item()


def linear_cka(a: Tensor, b: Tensor) -> float:
    """Return |Aᵀ B|² / (|Aᵀ A| |Bᵀ B|) of centred features, from 0 to 1; NaN for constant features.

    It is invariant to rotations and scaling. Kornblith, Norouzi, Lee, Hinton, ICML 2019, arXiv 1905.00414.

    Args:
        a: Features (N, D).
        b: Features (N, E) of the same examples.

    Raises:
        EnfoldError: If the shapes do not correspond.
    """
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        raise EnfoldError(
            f"a and b must be features of the same examples, got shapes {tuple(a.shape)} and {tuple(b.shape)}: "
            "pass tensors of shape (N, D) and (N, E)"
        )
    a, b = (each.detach().to("cpu", torch.float64) for each in (a, b))
    a, b = a - a.mean(0), b - b.mean(0)
    return float((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


def double_fault(p: Predictions) -> float:
    """Return the fraction of examples that both members of a pair misclassify, mean over pairs.

    Args:
        p: Predictions of the members.
    """
    return _pairs(_joint(p, "double_fault")[0]).mean().item()


def q_statistic(p: Predictions) -> float:
    """Return Yule's Q = (ad - bc) / (ad + bc), mean over pairs: 1 for the same errors, 0 for independent ones.

    a and d are the fractions of examples where both members are correct and where both are wrong; b and c those where
    only one is correct. Pairs with 0 / 0 are ignored; NaN if no pair is left, as for members without errors.

    Args:
        p: Predictions of the members.
    """
    both_wrong, one_right, both_right = _joint(p, "q_statistic")
    same, different = both_wrong * both_right, one_right * one_right.T
    return _pairs((same - different) / (same + different)).nanmean().item()


def error_correlation(p: Predictions) -> float:
    """Return the Pearson correlation of the members' errors (1 wrong, 0 correct), mean over pairs.

    Pairs with a member that is always correct or always wrong are ignored; NaN if no pair is left.

    Args:
        p: Predictions of the members.
    """
    both_wrong, _, _ = _joint(p, "error_correlation")
    error = both_wrong.diagonal()
    spread = (error * (1 - error)).sqrt()
    return _pairs((both_wrong - torch.outer(error, error)) / torch.outer(spread, spread)).nanmean().item()


def bregman_variance(p: Predictions) -> float:
    """Return (1/M) Σ_m KL(q ‖ p_m) around the centroid q ∝ exp((1/M) Σ_m log p_m), mean over examples.

    It equals -log Z with the normalizer Z = Σ_c exp((1/M) Σ_m log p_m(c)) of q.

    Args:
        p: Predictions of the members.
    """
    return weighted_mean(member_log_probs(p), p.weights).logsumexp(-1).clamp(max=0.0).abs().mean().item()


def masegosa_variance(p: Predictions) -> float:
    """Return (1/M) Σ_m (p_m(y) - p̄(y))² / (2 max_m p_m(y)²), mean over examples; 0 where all p_m(y) are 0.

    The second-order term that tightens Jensen's bound: Masegosa, "Learning under model misspecification",
    NeurIPS 2020, arXiv 1912.08335.

    Args:
        p: Predictions of the members.
    """
    own = of_label(member_log_probs(p), class_labels(p))  # (M, N)
    relative = (own - own.max(0).values).exp().nan_to_num(nan=0.0)  # p_m(y) / max_m p_m(y) without underflow
    if p.weights is None:
        return relative.var(0, correction=0).mean().item() / 2
    squared = (relative - weighted_mean(relative, p.weights)).square()
    return weighted_mean(squared, p.weights).mean().item() / 2


def _pairs(matrix: Tensor) -> Tensor:
    """Return the entries i < j."""
    i, j = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[i, j]


def _ratio(disagreed: Tensor, error: Tensor) -> Tensor:
    return torch.where(disagreed > 0, disagreed / error, 0.0)


def _joint(p: Predictions, measure: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return fractions of examples (M, M): both wrong, i correct and j wrong, both correct."""
    require_members(p, measure)
    right = per_member(example_correct, p)  # (M, N)
    wrong = 1 - right
    return wrong @ wrong.T / len(p), right @ wrong.T / len(p), right @ right.T / len(p)
