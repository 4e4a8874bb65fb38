"""Weights of the members from their likelihoods on held-out examples: Bayesian model averaging and stacking.

With ℓ_mn = log p_m(y_n | x_n) of N examples that no member was trained on:

    bma           w_m ∝ π_m exp(Σ_n ℓ_mn)                                                              (1)
    pseudo-bma    w   = mean over draws α ~ N Dirichlet(1, ..., 1) of softmax_m(Σ_n α_n ℓ_mn)          (2)
    stacking      w   = argmax over the simplex of Σ_n log Σ_m w_m exp(ℓ_mn)                           (3)

(1) is Bayes' rule for the members, with prior π, in which the held-out examples are the data. It asks which one member
is right, so that the weight collapses on a single member with many examples. (2), pseudo-BMA+, replaces each example's
count by a draw of the Bayesian bootstrap, which keeps members that are within the noise; without the draws it is (1).
(3) asks for the best mean, and may prefer two members that are right on different examples to the best one.

(2), (3) Y. Yao, A. Vehtari, D. Simpson, A. Gelman: Using stacking to average Bayesian predictive distributions,
Bayesian Analysis 13, 2018, arXiv:1704.02030; there ℓ is a leave-one-out estimate, here it is of held-out examples. (3)
is concave; it is solved by the EM iteration of a mixture,

    w_m <- w_m g_m,   g_m = mean_n p_mn / Σ_k w_k p_kn,                                                (4)

until no g exceeds 1 by more than `TOLERANCE`, which bounds the distance to the maximum per example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, member_log_probs, of_label
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.regression import member_density_nll
from enfold.metrics.regression_predictions import GaussianPredictions
from enfold.metrics.weights import as_weights
from enfold.seeds import generator

Averaging = Literal["bma", "pseudo-bma", "stacking"]
TOLERANCE = 1e-6  # nats per example
MOST = 20_000  # iterations of (4)


def averaging_weights(
    p: RowPredictions,
    kind: Averaging = "stacking",
    *,
    prior: Sequence[float] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, ...]:
    """Return a weight for each member, which sum to 1, equation (1), (2) or (3).

    Args:
        p: Predictions of the members on examples that they were not trained on.
        kind: "bma", "pseudo-bma" or "stacking".
        prior: π of equation (1), not negative; None for equal ones. Only for "bma".
        draws: The number of draws of (2).
        seed: The seed of the draws.

    Raises:
        EnfoldError: If an argument is invalid, or the predictions have no likelihood.
    """
    if kind not in get_args(Averaging):
        raise EnfoldError(f"kind must be one of {', '.join(get_args(Averaging))}, got {kind!r}: choose one of these")
    if prior is not None and kind != "bma":
        raise EnfoldError(f"prior must be None for kind='{kind}', got {prior!r}: leave it out, or use kind='bma'")
    if draws < 1:
        raise EnfoldError(f"draws must be at least 1, got {draws}: raise draws")
    likelihoods = member_log_likelihoods(p)  # (M, N)
    known = likelihoods[:, likelihoods.amax(0) > -torch.inf]  # for others, no member is better than another
    if not known.shape[1]:
        raise EnfoldError("no member gives any label a positive probability: check the labels, or train the members")
    if kind == "bma":
        beliefs = as_weights(prior, len(known))
        log_prior = torch.zeros(len(known)).double() if beliefs is None else torch.tensor(beliefs).double().log()
        found = torch.softmax(known.sum(1) + log_prior, 0)  # (1)
        if bool(found.isnan().any()):
            raise EnfoldError(
                "each member must give all labels a positive probability for kind='bma', or one member must, got none: "
                "use kind='stacking'"
            )
    else:
        found = _bootstrap(known, draws, seed) if kind == "pseudo-bma" else _stack(known)
    return tuple(found.tolist())


def member_log_likelihoods(p: RowPredictions) -> Tensor:
    """Return ℓ of every member and target, (M, N), in float64.

    Args:
        p: Predictions of the members.

    Raises:
        EnfoldError: If the predictions have no likelihood: points and quantiles of a regression.
    """
    if isinstance(p, Predictions):
        known = p.known()
        return of_label(member_log_probs(known), class_labels(known))
    if isinstance(p, GaussianPredictions):
        return -member_density_nll(p)
    raise EnfoldError(
        f"weights by likelihood need classes or Gaussians, got {type(p).__name__}: train networks that predict a mean "
        'and a variance, task=Regression(head="gaussian")'
    )


def _bootstrap(likelihoods: Tensor, draws: int, seed: int) -> Tensor:
    """Return equation (2)."""
    size, source = likelihoods.shape[1], generator(seed, "pseudo-bma")
    finite = likelihoods.clamp(min=-1e30)  # 0 times infinity is no number
    total = torch.zeros(len(likelihoods), dtype=torch.float64)
    for _ in range(draws):
        exponential = -torch.rand(size, generator=source, dtype=torch.float64).clamp(min=1e-300).log()
        total += torch.softmax(finite @ (size * exponential / exponential.sum()), 0)
    return total / draws


def _stack(likelihoods: Tensor) -> Tensor:
    """Return equation (3) by the iteration (4)."""
    probs = (likelihoods - likelihoods.amax(0)).exp()  # a factor for each example changes nothing
    weights = torch.full((len(probs),), 1 / len(probs), dtype=torch.float64)
    for _ in range(MOST):
        gains = (probs / (weights @ probs)).mean(1)  # (4)
        if float(gains.max()) <= 1 + TOLERANCE:
            break
        weights = weights * gains
        weights = weights / weights.sum()
    return weights
