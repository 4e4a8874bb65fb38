import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enfold.errors import EnfoldError
from enfold.metrics import (
    ambiguity_decomposition,
    bias_variance_covariance,
    gibbs_nll,
    jensen_gap,
    left_out_fraction,
    majority_vote_accuracy,
    nll,
)
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)
numbers = st.floats(-10, 10)


@prop
@given(
    outputs=hnp.arrays(np.float64, (4, 3), elements=numbers),
    target=hnp.arrays(np.float64, 3, elements=numbers),
)
def test_ambiguity(outputs, target):
    a = ambiguity_decomposition(torch.from_numpy(outputs), torch.from_numpy(target))
    torch.testing.assert_close(a.ensemble, a.members - a.ambiguity, rtol=0, atol=1e-12)
    assert (a.ambiguity >= 0).all()


def test_ambiguity_by_hand():
    a = ambiguity_decomposition(torch.tensor([1.0, 3.0]), torch.tensor(1.0))
    assert (a.ensemble.item(), a.members.item(), a.ambiguity.item()) == (1.0, 2.0, 1.0)


@prop
@given(
    draws=hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4), st.just(2)), elements=numbers),
    target=hnp.arrays(np.float64, 2, elements=numbers),
)
def test_bias_variance_covariance(draws, target):
    d = bias_variance_covariance(torch.from_numpy(draws), torch.from_numpy(target))
    M = draws.shape[1]
    parts = d.bias.square() + d.variance / M + (1 - 1 / M) * d.covariance
    torch.testing.assert_close(d.error, parts, rtol=0, atol=1e-11)


def test_bias_variance_covariance_agrees_with_numpy():
    draws = np.random.default_rng(0).normal(size=(50, 3)) + 1
    d = bias_variance_covariance(torch.from_numpy(draws), torch.tensor(0.5))
    matrix = np.cov(draws, rowvar=False, bias=True)
    assert d.variance.item() == pytest.approx(np.diag(matrix).mean())
    assert d.covariance.item() == pytest.approx(matrix[~np.eye(3, dtype=bool)].mean())
    assert d.bias.item() == pytest.approx(draws.mean() - 0.5)


def test_uncorrelated_errors_average_out():
    draws = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = bias_variance_covariance(draws, torch.tensor(0.0))
    assert d.error.item() == pytest.approx(d.variance.item() / 5, rel=0.05)


@prop
@given(p=st.from_type(Predictions))
def test_jensen_gap_is_what_averaging_gains(p):
    gap = jensen_gap(p)
    assert (gap >= 0).all()
    if math.isfinite(nll(p)):
        assert gap.mean().item() == pytest.approx(gibbs_nll(p) - nll(p), abs=1e-12)


def test_jensen_gap_of_impossible_labels():
    p = Predictions(torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.5, 0.5]]]).log(), torch.tensor([1, 1]))
    assert jensen_gap(p).tolist() == [0.0, math.inf]


def test_majority_vote_by_hand():
    assert majority_vote_accuracy(1, 0.3) == pytest.approx(0.7)
    assert majority_vote_accuracy(2, 0.3) == pytest.approx(0.7)  # 0.49 won, 0.42 tied
    assert majority_vote_accuracy(3, 0.3) == pytest.approx(0.7**3 + 3 * 0.7**2 * 0.3)
    assert majority_vote_accuracy(5, 0.0) == 1.0
    assert majority_vote_accuracy(4, 1.0) == 0.0


@prop
@given(M=st.integers(1, 40), error=st.floats(0, 1))
def test_majority_vote_is_a_binomial_tail(M, error):
    def probability(k):
        return math.comb(M, k) * (1 - error) ** k * error ** (M - k)

    won = math.fsum(probability(k) * (1.0 if 2 * k > M else 0.5 if 2 * k == M else 0.0) for k in range(M + 1))
    assert majority_vote_accuracy(M, error) == pytest.approx(won, abs=1e-12)


def test_majority_vote_in_the_limit():
    assert majority_vote_accuracy(100_001, 0.49) > 0.999
    assert majority_vote_accuracy(100_001, 0.51) < 0.001


def test_a_bootstrap_sample_omits_a_third():
    N = 10_000
    drawn = torch.randint(N, (N,), generator=torch.Generator().manual_seed(0)).unique()
    assert 1 - len(drawn) / N == pytest.approx(left_out_fraction(N), abs=0.01)
    assert left_out_fraction(N) == pytest.approx(math.exp(-1), abs=1e-4)
    assert left_out_fraction(1) == 0.0


def test_invalid_input_is_refused():
    with pytest.raises(EnfoldError, match="num_members"):
        majority_vote_accuracy(0, 0.3)
    with pytest.raises(EnfoldError, match="error=30"):
        majority_vote_accuracy(3, 30)
    with pytest.raises(EnfoldError, match="examples"):
        left_out_fraction(0)
