"""Uncertainties of a Dirichlet distribution, against samples, torch.distributions and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Dirichlet

from enfold.metrics import decomposition
from enfold.metrics.dirichlet import (
    concentrations,
    differential_entropy,
    dirichlet_uncertainty,
    expected_log_probs,
    log_beta,
)
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)

alphas_of = st.lists(st.floats(0.05, 50), min_size=2, max_size=6).map(lambda a: torch.tensor(a, dtype=torch.float64))


def test_samples_agree():
    """The uncertainties of an ensemble of many members drawn from the distribution are nearly its own."""
    alphas = torch.tensor([[2.0, 1.0, 0.7], [30.0, 5.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    torch.manual_seed(0)
    drawn = Dirichlet(alphas).sample((100_000,))  # (members, 3 examples, 3 classes)
    sampled = decomposition(Predictions(drawn.clamp(min=1e-300).log(), torch.zeros(3, dtype=torch.long)))
    exact = dirichlet_uncertainty(alphas)
    for name in ("total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(exact, name), getattr(sampled, name), rtol=0.01, atol=0.002)
    torch.testing.assert_close(exact.epkl, sampled.epkl, rtol=0.02, atol=0.0)
    torch.testing.assert_close(exact.mkl, sampled.rmi, rtol=0.02, atol=0.0)
    torch.testing.assert_close(exact.precision, torch.tensor([3.7, 36.0, 3.0], dtype=torch.float64))


def test_by_hand():
    """The uniform distribution over two probabilities: total ln 2, aleatoric 1/2, epkl 1/2."""
    found = dirichlet_uncertainty(torch.ones(2))
    assert float(found.total) == pytest.approx(math.log(2))
    assert float(found.aleatoric) == pytest.approx(0.5)
    assert float(found.epistemic) == pytest.approx(math.log(2) - 0.5)
    assert float(found.epkl) == pytest.approx(0.5)
    assert float(found.mkl) == pytest.approx(1 - math.log(2))
    assert float(found.precision) == 2


@prop
@given(alphas=alphas_of)
def test_identities_and_bounds(alphas: Tensor):
    found = dirichlet_uncertainty(alphas)
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.epistemic + found.mkl, found.epkl, rtol=1e-10, atol=1e-12)
    assert float(found.total) <= math.log(len(alphas)) + 1e-12
    assert all(float(value) >= 0 for value in vars(found).values())


@prop
@given(alphas=alphas_of)
def test_epistemic_uncertainty_vanishes_with_the_precision(alphas: Tensor):
    precisions = torch.tensor([1e1, 1e3, 1e5, 1e9], dtype=torch.float64)
    found = dirichlet_uncertainty(alphas / alphas.sum() * precisions[:, None])
    assert (found.epistemic[:-1] >= found.epistemic[1:]).all()
    assert float(found.epistemic[-1]) < 1e-7
    torch.testing.assert_close(found.total, found.total[:1].expand(4))
    torch.testing.assert_close(found.aleatoric[-1], found.total[-1], rtol=0, atol=1e-7)


@prop
@given(alphas=alphas_of)
def test_torch_agrees(alphas: Tensor):
    reference = Dirichlet(alphas)
    torch.testing.assert_close(differential_entropy(alphas), reference.entropy(), rtol=1e-9, atol=1e-9)
    point = alphas / alphas.sum()
    density = ((alphas - 1) * point.log()).sum() - log_beta(alphas)
    torch.testing.assert_close(density, reference.log_prob(point), rtol=1e-9, atol=1e-9)
    step = 1e-6 * torch.eye(len(alphas), dtype=torch.float64)  # E[ln π_k] is the slope of ln B
    slope = (log_beta(alphas + step) - log_beta(alphas - step)) / 2e-6
    torch.testing.assert_close(expected_log_probs(alphas), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_concentrations_are_validated(offset):
    logits = torch.tensor([-1e6, -60.0, 0.0, 60.0, 1e6], requires_grad=True)
    alphas = concentrations(logits, offset)
    assert alphas.dtype == torch.float64
    torch.testing.assert_close(alphas[1:4], logits[1:4].double().exp() + offset)
    values = log_beta(alphas) + differential_entropy(alphas) + expected_log_probs(alphas).sum()
    assert bool(torch.isfinite(values))
    values.backward()
    assert bool(torch.isfinite(logits.grad).all())
