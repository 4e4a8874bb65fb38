"""Sinkhorn against its definition, closed forms and invariances; its two gradients against autograd."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.merge.common.sinkhorn import sinkhorn, softness

module = sys.modules["enfold.merge.common.sinkhorn"]  # the function has its name


def literal(scores: Tensor, iterations: int) -> Tensor:
    """Rows, then columns, in the log domain, as it is defined."""
    for _ in range(iterations):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


def draws(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0, 60.0, 400.0]), st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_values_and_gradients_are_those_of_the_iterations_themselves(seed, size, scale, iterations):
    scores = draws(2, size, size, seed=seed, scale=scale).requires_grad_()
    weights = draws(2, size, size, seed=seed + 1)
    expected = literal(scores, iterations)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), scores)
    found, _ = sinkhorn(scores, iterations)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    (own,) = torch.autograd.grad((weights * found).sum(), scores)
    torch.testing.assert_close(own, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0])
def test_float32_does_not_overflow_for_large_scores(scale):
    scores = draws(3, 9, 9, scale=scale)
    single = scores.float().requires_grad_()
    found, _ = sinkhorn(single, 100)
    found.square().sum().backward()
    torch.testing.assert_close(found.double(), literal(scores, 100), rtol=1e-3, atol=1e-4)
    assert torch.isfinite(single.grad).all()


@given(st.integers(0, 10_000), st.integers(2, 7))
@settings(max_examples=20, deadline=None)
def test_columns_sum_to_one_exactly_and_rows_in_the_limit(seed, size):
    scores = draws(size, size, seed=seed)
    found, _ = sinkhorn(scores, 3)
    torch.testing.assert_close(found.sum(0), torch.ones(size, dtype=torch.float64), rtol=0, atol=1e-14)
    found, _ = sinkhorn(scores, 10_000, 1e-12)
    torch.testing.assert_close(found.sum(1), torch.ones(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (found >= 0).all()


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 10.0])
def test_the_identity_has_a_closed_form(temperature):
    size, e = 12, math.exp(1 / temperature)
    found, _ = sinkhorn(torch.eye(size, dtype=torch.float64) / temperature, 100)
    z = e + size - 1
    expected = (e - 1) / z * torch.eye(size, dtype=torch.float64) + 1 / z
    torch.testing.assert_close(found, expected)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_sinkhorn_is_invariant_to_constants_and_equivariant_to_permutations(seed):
    scores, u, v = (draws(6, *rest, seed=seed + k) for k, rest in enumerate([(6,), (1,), (1,)]))
    found, _ = sinkhorn(scores, 5000, 1e-13)
    shifted, _ = sinkhorn(scores + u + v.mT, 5000, 1e-13)
    torch.testing.assert_close(shifted, found, rtol=1e-7, atol=1e-9)
    rows, columns = (torch.randperm(6, generator=torch.Generator().manual_seed(seed + k)) for k in range(2))
    moved, _ = sinkhorn(scores[rows][:, columns], 100)
    torch.testing.assert_close(moved, sinkhorn(scores, 100)[0][rows][:, columns])


def test_a_tolerance_stops_early_with_a_bounded_error():
    scores = draws(4, 20, 20)
    stopped, _ = sinkhorn(scores, 100, 1e-6)
    torch.testing.assert_close(stopped, sinkhorn(scores, 100)[0], rtol=0, atol=1e-6)
    assert 0 < float((stopped.sum(-1) - 1).abs().max()) < 1e-6  # exact sums would mean that it went on
    one, _ = sinkhorn(scores, 1)
    assert float((one.sum(-1) - 1).abs().max()) > 1e-6


def test_a_tolerance_below_rounding_is_rounding(monkeypatch):
    scores, products = draws(4, 20, 20).float(), []
    own = module._by_rows
    monkeypatch.setattr(module, "_by_rows", lambda *given: products.append(1) or own(*given))
    found, _ = sinkhorn(scores, 100, 1e-12)
    assert len(products) < 100
    torch.testing.assert_close(found, sinkhorn(scores, 100)[0], rtol=0, atol=1e-6)


def test_a_warm_start_continues_the_iterations():
    scores = draws(2, 8, 8, scale=5.0)
    _, columns = sinkhorn(scores, 30)
    went_on, _ = sinkhorn(scores, 20, start=columns)
    torch.testing.assert_close(went_on, sinkhorn(scores, 50)[0], rtol=1e-9, atol=1e-12)


def test_after_a_warm_start_the_unrolled_gradient_covers_the_remaining_iterations():
    scores = draws(6, 6).requires_grad_()
    wanted = draws(6, 6, seed=3)
    start = sinkhorn(scores.detach(), 500, 1e-14)[1]

    def gradient(**how):
        return torch.autograd.grad((sinkhorn(scores, start=start, **how)[0] * wanted).sum(), scores)[0]

    left = literal(scores - start, 1)
    expected = torch.autograd.grad((left * wanted).sum(), scores)[0]
    torch.testing.assert_close(gradient(iterations=1), expected)
    limit = gradient(iterations=1, gradient="implicit")
    errors = [float((gradient(iterations=count) - limit).norm()) for count in (1, 3, 100)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-8 * float(limit.norm()) < errors[0]


def test_gradients_of_gradients_are_refused():
    scores = draws(4, 4).requires_grad_()
    first = torch.autograd.grad(sinkhorn(scores)[0].square().sum(), scores, create_graph=True)[0].sum()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.backward()


def test_the_implicit_gradient_is_that_of_the_limit():
    scores = draws(2, 5, 5, scale=2.0).requires_grad_()
    weights = draws(2, 5, 5, seed=3)
    (unrolled,) = torch.autograd.grad((weights * literal(scores, 3000)).sum(), scores)
    found, _ = sinkhorn(scores, 3000, 1e-15, gradient="implicit")
    (implicit,) = torch.autograd.grad((weights * found).sum(), scores)
    torch.testing.assert_close(implicit, unrolled, rtol=1e-7, atol=1e-9)


def test_the_implicit_gradient_of_large_matrices_is_that_of_the_limit_to_many_digits():
    """There are more directions to solve in than steps that a lax precision would take."""
    scores, weights = draws(2, 32, 32, scale=3.0).requires_grad_(), draws(2, 32, 32, seed=3)
    limits = []
    for gradient in ("unrolled", "implicit"):
        found, _ = sinkhorn(scores, 2000, 1e-15, gradient=gradient)
        limits += torch.autograd.grad((weights * found).sum(), scores)
    error = float((limits[1] - limits[0]).norm() / limits[0].norm())
    assert error < 1e-10


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_gradcheck(gradient):
    scores = draws(2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: sinkhorn(given, 500, 1e-15, gradient=gradient)[0], scores)


def test_the_softness_of_a_permutation_is_0_and_that_of_the_uniform_matrix_1():
    permutation = torch.eye(5)[torch.tensor([3, 0, 4, 1, 2])]
    found = softness(torch.stack([permutation, torch.full((5, 5), 0.2)]))
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0]))
    assert softness(torch.ones(2, 1, 1)).tolist() == [0.0, 0.0]


def test_invalid_inputs_are_refused():
    with pytest.raises(EnfoldError, match=r"scores must be square.*got \(2, 3\)"):
        sinkhorn(torch.zeros(2, 3))
    with pytest.raises(EnfoldError, match="1 iteration or more"):
        sinkhorn(torch.zeros(2, 2), 0)
    assert torch.equal(sinkhorn(torch.eye(3), 2.5)[0], sinkhorn(torch.eye(3), 3)[0]), "it ends"
    with pytest.raises(EnfoldError, match="must be one of unrolled, implicit, got 'exact'"):
        sinkhorn(torch.zeros(2, 2), gradient="exact")
