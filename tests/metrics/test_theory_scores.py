"""The theory of averaging as scores: its inequalities hold, and evaluate adds them on request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import enfold
from enfold.metrics import (
    PointPredictions,
    Predictions,
    gibbs_mse,
    gibbs_nll,
    majority_vote_accuracy,
    mse,
    nll,
    theory_scores,
    vote_accuracy,
)
from enfold.networks import MLP


def members(seed: int, count: int = 4, scale: float = 2.0, weights=None) -> Predictions:
    source = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, 30, 3, generator=source, dtype=torch.float64)
    return Predictions.from_logits(logits, torch.arange(30) % 3).with_weights(weights)


@given(st.integers(0, 50), st.integers(2, 6), st.floats(0.1, 4), st.booleans())
def test_the_bounds_hold(seed, count, scale, is_weighted):
    p = members(seed, count, scale, tuple(range(1, count + 1)) if is_weighted else None)
    found = theory_scores(p)
    assert found["jensen_gap"] >= 0
    assert 0 <= found["masegosa_variance"] <= found["jensen_gap"] + 1e-9  # (1): V is at most the gap
    assert found["masegosa_bound"] >= nll(p) - 1e-9
    assert found["bregman_variance"] >= 0


def test_scores_are_the_functions_of_their_names():
    p = members(0)
    found = theory_scores(p)
    assert found["vote_accuracy"] == vote_accuracy(p)
    assert found["jensen_gap"] == pytest.approx(gibbs_nll(p) - nll(p))
    error = 1 - sum(float((each.argmax(-1) == p.labels).double().mean()) for each in p.log_probs) / 4
    assert found["independent_vote_accuracy"] == pytest.approx(majority_vote_accuracy(4, error))


def test_numbers_have_the_ambiguity():
    source = torch.Generator().manual_seed(0)
    p = PointPredictions(torch.randn(3, 20, generator=source), torch.randn(20, generator=source))
    assert theory_scores(p) == {"ambiguity": pytest.approx(gibbs_mse(p) - mse(p))}


def test_a_single_network_has_no_theory():
    assert theory_scores(members(0).member(1)) == {}


def test_evaluate_adds_them_on_request():
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble([MLP(4, [5], 3) for _ in range(3)])
    data = torch.randn(30, 4), torch.arange(30) % 3
    plain, more = enfold.evaluate(ensemble, data), enfold.evaluate(ensemble, data, theory=True)
    assert more.scores.keys() - plain.scores.keys() == theory_scores(enfold.predict(ensemble, data)).keys()
    assert enfold.evaluate(ensemble.member(0), data, theory=True).scores.keys() == plain.scores.keys()
