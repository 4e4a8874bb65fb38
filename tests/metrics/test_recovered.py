import math

import pytest
import torch
from scipy.stats import norm

from enfold.errors import EnfoldError
from enfold.metrics import (
    beyond_noise,
    example_brier,
    example_nll,
    gain_interval,
    gain_recovered,
    mean_member,
    nll,
    paired_bootstrap,
)
from enfold.metrics import recovered as module
from enfold.metrics.predictions import Predictions


def members(M=4, N=2000, seed=0, noise=1.0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (N,), generator=rng)
    logits = 2.0 * torch.nn.functional.one_hot(labels, 5) + noise * torch.randn(M, N, 5, generator=rng)
    return Predictions.from_logits(logits, labels)


def test_half_of_the_gain():
    assert gain_recovered(0.308, 0.318, 0.298, higher_is_better=False) == pytest.approx(0.5)
    assert gain_recovered(0.91, 0.90, 0.92, higher_is_better=True) == pytest.approx(0.5)


def test_ends_and_beyond():
    assert gain_recovered(0.3, 0.3, 0.2, higher_is_better=False) == 0.0
    assert gain_recovered(0.2, 0.3, 0.2, higher_is_better=False) == 1.0
    assert gain_recovered(0.4, 0.3, 0.2, higher_is_better=False) == pytest.approx(-1.0)
    assert gain_recovered(0.1, 0.3, 0.2, higher_is_better=False) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("values", "higher_is_better"),
    [
        ((0.9, 0.9, 0.9), True),
        ((0.91, 0.90, 0.89), True),
        ((0.2, 0.2, 0.3), False),
        ((0.2, math.inf, 0.3), False),
        ((math.nan, 0.3, 0.2), False),
    ],
)
def test_no_gain_is_not_recovered(values, higher_is_better):
    assert math.isnan(gain_recovered(*values, higher_is_better=higher_is_better))


def test_a_gain_within_noise_is_not_recovered():
    assert math.isnan(gain_recovered(0.91, 0.90, 0.92, higher_is_better=True, interval=(-0.01, 0.05)))
    assert gain_recovered(0.91, 0.90, 0.92, higher_is_better=True, interval=(0.01, 0.03)) == pytest.approx(0.5)


def test_beyond_noise():
    assert beyond_noise((0.1, 0.2))
    assert beyond_noise((-0.2, -0.1))
    assert not beyond_noise((-0.1, 0.1))
    assert not beyond_noise((0.0, 0.1))


def test_the_interval_is_that_of_the_normal_approximation():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(4000, generator=rng).double() + 0.1, torch.zeros(4000).double()
    low, high = paired_bootstrap(a, b, samples=4000, level=0.9)
    half = norm.ppf(0.95) * a.std().item() / math.sqrt(4000)
    assert low == pytest.approx(a.mean().item() - half, abs=0.1 * half)
    assert high == pytest.approx(a.mean().item() + half, abs=0.1 * half)


def test_pairing_removes_common_variance():
    rng = torch.Generator().manual_seed(1)
    common = 100 * torch.randn(500, generator=rng)
    low, high = paired_bootstrap(common + 1, common)
    assert low == pytest.approx(1, abs=1e-4)
    assert high == pytest.approx(1, abs=1e-4)


def test_same_seed_same_interval():
    p = members()
    a, b = example_nll(p), example_brier(p)
    assert paired_bootstrap(a, b, seed=3) == paired_bootstrap(a, b, seed=3)
    assert paired_bootstrap(a, b, seed=3) != paired_bootstrap(a, b, seed=4)


def test_little_memory_gives_the_same_interval(monkeypatch):
    a, b = torch.arange(50.0), torch.zeros(50)
    at_once = paired_bootstrap(a, b, samples=41)
    monkeypatch.setattr(module, "_DRAWS_AT_ONCE", 120)  # 2 rows at once, and a last single one
    assert paired_bootstrap(a, b, samples=41) == at_once
    monkeypatch.setattr(module, "_DRAWS_AT_ONCE", 10)
    assert paired_bootstrap(a, b, samples=41) == at_once


def test_an_ensemble_of_noisy_members_gains():
    p = members()
    low, high = gain_interval(p)
    assert 0 < low < high
    low, high = gain_interval(p, example_nll)
    assert low < nll(p) - mean_member(nll, p) < high < 0


def test_an_ensemble_of_copies_does_not():
    p = members(M=1)
    copies = Predictions(p.log_probs.expand(3, -1, -1), p.labels)
    low, high = gain_interval(copies)
    assert low == pytest.approx(0.0, abs=1e-15)
    assert high == pytest.approx(0.0, abs=1e-15)


def test_invalid_input_is_refused():
    a = torch.zeros(3)
    with pytest.raises(EnfoldError, match=r"shapes \(3,\) and \(2,\)"):
        paired_bootstrap(a, torch.zeros(2))
    with pytest.raises(EnfoldError, match=r"shapes \(0,\)"):
        paired_bootstrap(torch.zeros(0), torch.zeros(0))
    with pytest.raises(EnfoldError, match=r"a_per_example .*got 1"):
        paired_bootstrap(a, torch.tensor([0.0, math.inf, 0.0]))
    with pytest.raises(EnfoldError, match="samples=0"):
        paired_bootstrap(a, a, samples=0)
    with pytest.raises(EnfoldError, match="level=95"):
        paired_bootstrap(a, a, level=95)
    with pytest.raises(EnfoldError, match="at least 2, got 1"):
        gain_interval(members(M=1))
