"""Correlations against scipy, with ties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from enfold.errors import EnfoldError
from enfold.metrics.ranks import average_ranks, pearson, spearman

pairs = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=10)


@settings(derandomize=True, max_examples=25)
@given(pairs)
def test_agrees_with_scipy(values):
    a, b = torch.tensor(values, dtype=torch.float64).T
    assert average_ranks(a).tolist() == stats.rankdata(a).tolist()
    if len(a.unique()) == 1 or len(b.unique()) == 1:
        assert math.isnan(pearson(a, b))
        assert math.isnan(spearman(a, b))
    else:
        assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


def test_other_examples_are_refused():
    with pytest.raises(EnfoldError, match="a and b"):
        pearson(torch.ones(3), torch.ones(4))
