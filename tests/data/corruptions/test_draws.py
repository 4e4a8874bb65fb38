import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.noise import poisson


def draws(seed=0, kind="snow", count=200):
    return Draws(seed, kind, torch.arange(count))


@given(st.integers(-(2**62), 2**62), st.integers(0, 2**40), st.integers(1, 50))
def test_numbers_depend_on_seed_and_index_only(seed, index, size):
    alone = Draws(seed, "fog", torch.tensor([index])).uniform(size)
    among = Draws(seed, "fog", torch.tensor([5, index, 0, index + 1])).uniform(size)
    assert torch.equal(among[1:2], alone)
    assert 0 < alone.min() <= alone.max() < 1


def test_calls_continue_the_stream():
    once, twice = draws(), draws()
    torch.testing.assert_close(
        once.uniform(6), torch.cat([twice.uniform(4), twice.uniform(1, 2).flatten(1)], 1), rtol=0, atol=0
    )


def test_seeds_kinds_and_images_have_independent_numbers():
    first = draws().uniform(1000)
    others = [draws(seed=1).uniform(1000), draws(kind="fog").uniform(1000), first.roll(1, 0)]
    for other in others:
        assert not (first == other).all(1).any()
        assert abs(np.corrcoef(first.flatten(), other.flatten())[0, 1]) < 4 / np.sqrt(first.numel())


def test_uniform_numbers_pass_the_usual_tests():
    numbers = draws(count=300).uniform(3, 32, 32)
    assert stats.kstest(numbers.flatten().double().numpy(), "uniform").pvalue > 1e-3
    counts = torch.histc(numbers, 512, 0, 1).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3
    centred = (numbers - 0.5) * 12**0.5
    power = torch.fft.rfft2(centred).abs().square().mean((0, 1)) / 1024  # of white noise: 1 at every frequency
    assert 0.8 < power.min() < power.max() < 1.2
    neighbours = (centred[..., 1:] * centred[..., :-1]).mean() * numbers.numel() ** 0.5
    assert abs(neighbours) < 4


def test_normal_numbers():
    numbers = draws(count=300).normal(3, 32, 32).flatten().double().numpy()
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    assert abs(stats.skew(numbers)) < 0.01
    assert abs(stats.kurtosis(numbers)) < 0.02
    assert 4 < np.abs(numbers).max() < 5.4


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.7, 3, 7.99, 8.01, 12, 40, 150, 500])
def test_poisson_numbers(rate):
    signed = draws(count=40).draw_signed(1000)
    counts = poisson(torch.full_like(signed, rate), signed)
    exact = stats.poisson.ppf((1 + signed.double().numpy()) / 2, rate) if rate else np.zeros(signed.shape)
    differ = counts.numpy() != exact
    assert differ.mean() <= (0 if rate < 8 else 0.004)
    assert np.abs(counts.numpy() - exact).max() <= 1
    count = counts.numel()
    assert counts.mean().item() == pytest.approx(rate, abs=5 * (rate / count) ** 0.5)
    assert counts.var().item() == pytest.approx(rate, abs=5 * ((rate + 2 * rate**2) / count) ** 0.5)


def test_poisson_of_mixed_rates_in_one_batch():
    rates = torch.tensor([[0.5, 20.0, 3.0, 300.0]])
    signed = torch.tensor([[0.1, -0.3, 0.9, 0.0]])
    exact = stats.poisson.ppf((1 + signed.double().numpy()) / 2, rates.numpy())
    np.testing.assert_array_equal(poisson(rates, signed).numpy(), exact)
