"""Weights of members: every metric of the mean equals that of the weighted mean, and equal weights change no bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import (
    GaussianPredictions,
    PointPredictions,
    Predictions,
    QuantilePredictions,
    decomposition,
    jensen_gap,
    majority_vote,
    masegosa_variance,
    metrics_for,
    ood_scores,
    pairwise_kl,
)
from enfold.metrics.averaging import averaging_weights
from enfold.metrics.weights import as_weights, mean_log_probs, select_weights, weighted_mean

W = (0.5, 0.0, 0.2, 0.3)


def logits(seed: int = 0, members: int = 4, size: int = 40) -> Tensor:
    return torch.randn(members, size, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = torch.arange(40) % 5


def classes(weights=None) -> Predictions:
    return Predictions.from_logits(logits(), LABELS).with_weights(weights)


def numbers(kind: str, weights=None):
    source = torch.Generator().manual_seed(1)
    means, variances, targets = (torch.rand(4, 40, generator=source) for _ in range(3))
    if kind == "points":
        found = PointPredictions(means, targets[0])
    elif kind == "quantiles":
        found = QuantilePredictions(
            torch.stack([means - variances, means, means + variances], -1), targets[0], (0.1, 0.5, 0.9)
        )
    else:
        found = GaussianPredictions(means, targets[0], variances + 0.1, variances / 10)
    return found.with_weights(weights)


MADE = {
    "classes": lambda w=None: classes(w),
    **{kind: lambda w=None, kind=kind: numbers(kind, w) for kind in ("points", "gaussians", "quantiles")},
}


@pytest.mark.parametrize("kind", MADE)
def test_repeated_members_are_the_weighted_ones(kind):
    """Weights of 2/5, 2/5 and 1/5 are members that occur two, two times and once."""
    p = MADE[kind]().subset([0, 2, 3])
    repeated, weighted = p.subset([0, 0, 1, 1, 2]), p.with_weights((2, 2, 1))
    of_members = {"gibbs", "disagreement", "member"}
    for name, metric in metrics_for(p).items():
        if not any(word in name for word in of_members):
            assert metric(weighted) == pytest.approx(metric(repeated), rel=1e-9, abs=1e-12), name
    torch.testing.assert_close(weighted.uncertainty(), repeated.uncertainty())


@pytest.mark.parametrize("kind", MADE)
def test_equal_weights_change_no_bit(kind):
    plain, weighted = MADE[kind](), MADE[kind]((3.0,) * 4)
    assert weighted.weights is None
    for name, metric in metrics_for(plain).items():
        assert metric(weighted) == metric(plain), name


@pytest.mark.parametrize("kind", MADE)
def test_members_of_weight_zero_have_no_effect_on_the_mean(kind):
    p, without = MADE[kind]((0.5, 0.0, 0.2, 0.3)), MADE[kind]().subset([0, 2, 3]).with_weights((0.5, 0.2, 0.3))
    for one, other in zip(vars(p.mean()).values(), vars(without.mean()).values(), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
    assert p.subset([0, 2, 3]).weights == pytest.approx(without.weights)
    assert p.member(2).weights is None
    assert p.select(torch.arange(7)).weights == p.weights


def test_a_weight_of_zero_hides_infinite_values():
    values = torch.tensor([[1.0, 2.0], [math.inf, math.nan], [3.0, 4.0]])
    assert weighted_mean(values, (0.5, 0.0, 0.5)).tolist() == [2.0, 3.0]
    assert mean_log_probs(torch.log(values.nan_to_num(0.0, 0.0)), (0.0, 0.0, 1.0)).exp().tolist() == pytest.approx(
        [3, 4]
    )


def test_uncertainties_and_variances_are_those_of_repeated_members():
    p = classes().subset([0, 2, 3])
    repeated, weighted = p.subset([0, 0, 1, 1, 2]), p.with_weights((2, 2, 1))
    for one, other in zip(vars(decomposition(weighted)).values(), vars(decomposition(repeated)).values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(jensen_gap(weighted), jensen_gap(repeated))
    assert masegosa_variance(weighted) == pytest.approx(masegosa_variance(repeated))
    assert torch.equal(majority_vote(weighted), majority_vote(repeated))
    for name, scores in ood_scores(weighted).items():
        torch.testing.assert_close(scores, ood_scores(repeated)[name], msg=name)
    assert pairwise_kl(weighted) == pairwise_kl(p)  # compares members, which have no weights


@pytest.mark.parametrize("wrong", [(1.0,), (1.0, -1.0, 1.0, 1.0), (0.0,) * 4, (math.nan, 1, 1, 1), (math.inf, 1, 1, 1)])
def test_invalid_weights_are_refused(wrong):
    with pytest.raises(EnfoldError, match="weights"):
        classes(wrong)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6).filter(lambda values: sum(values) > 1e-3))
def test_weights_sum_to_one_and_equal_ones_are_none(values):
    found = as_weights(values, len(values))
    assert (found is None) == (len(set(values)) == 1)
    if found is not None:
        assert sum(found) == pytest.approx(1)
        assert select_weights(found, range(len(found))) == pytest.approx(found)


# Averaging


def with_likelihoods(table: Tensor) -> Predictions:
    """Predictions of two classes in which member m gives the label of example n the probability table[m, n]."""
    return Predictions(torch.stack([table, 1 - table], -1).log(), torch.zeros(table.shape[1], dtype=torch.long))


def test_bma_is_bayes_rule():
    table = torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.7, 0.9]], dtype=torch.float64)
    found = averaging_weights(with_likelihoods(table), "bma", prior=(1, 3))
    posterior = torch.tensor([1, 3]) * table.prod(1)
    assert found == pytest.approx((posterior / posterior.sum()).tolist())


def test_pseudo_bma_is_closer_to_equal_than_bma_and_follows_the_seed():
    table = torch.rand(3, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.5 + 0.4
    bma, pseudo = (averaging_weights(with_likelihoods(table), kind) for kind in ("bma", "pseudo-bma"))
    assert max(pseudo) < max(bma)
    assert sum(pseudo) == pytest.approx(1)
    assert pseudo == averaging_weights(with_likelihoods(table), "pseudo-bma")
    assert pseudo != averaging_weights(with_likelihoods(table), "pseudo-bma", seed=1)


def test_stacking_is_the_best_mean_of_a_grid():
    table = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight, _ = averaging_weights(with_likelihoods(table), "stacking")
    grid = torch.linspace(0, 1, 10001, dtype=torch.float64)[:, None]
    score = (grid * table[0] + (1 - grid) * table[1]).log().sum(1)
    assert weight == pytest.approx(float(grid[score.argmax()]), abs=2e-3)


def test_stacking_uses_two_members_that_are_right_on_different_examples():
    table = torch.full((3, 40), 0.5, dtype=torch.float64)
    table[0, :20], table[0, 20:] = 0.99, 0.01
    table[1, :20], table[1, 20:] = 0.01, 0.99
    p = with_likelihoods(table)
    assert averaging_weights(p, "bma")[2] > 0.99  # the best one member
    assert averaging_weights(p, "stacking") == pytest.approx((1 / 3, 1 / 3, 1 / 3), abs=0.2)
    table[2] = 0.2
    assert averaging_weights(with_likelihoods(table), "stacking") == pytest.approx((0.5, 0.5, 0), abs=1e-3)


def test_a_member_without_a_chance_gets_no_weight_and_hopeless_examples_do_not_count():
    table = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    for kind in ("bma", "pseudo-bma", "stacking"):
        assert averaging_weights(with_likelihoods(table), kind) == pytest.approx((1, 0), abs=1e-3), kind


def test_gaussians_have_likelihoods_and_points_have_not():
    assert sum(averaging_weights(numbers("gaussians"), "bma")) == pytest.approx(1)
    for kind in ("points", "quantiles"):
        with pytest.raises(EnfoldError, match="likelihood"):
            averaging_weights(numbers(kind))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "best"}, "kind"),
        ({"prior": (1, 1, 1, 1)}, "prior"),
        ({"draws": 0}, "draws"),
        ({"kind": "bma", "prior": (1,)}, "weights"),
    ],
)
def test_invalid_arguments_of_averaging_are_refused(settings, named):
    with pytest.raises(EnfoldError, match=named):
        averaging_weights(classes(), **settings)
