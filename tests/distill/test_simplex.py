"""The quadratic programme on a capped simplex, against closed forms, its optimality conditions and other solvers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from enfold.distill.losses.common.simplex import capped_simplex_weights
from enfold.errors import EnfoldError

prop = settings(deadline=None, derandomize=True, max_examples=25)


def vectors_of(seed: int, count: int, dimension: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, dimension, dtype=torch.float64, generator=generator)
    shift = torch.randn(1, dimension, dtype=torch.float64, generator=generator)  # so that 0 is not always in the hull
    if rank is not None:
        drawn = drawn[torch.randint(min(rank, count), (count,), generator=generator)]  # several are the same
    return drawn + shift


def capped(count: int, fraction: float) -> float:
    return min(1 / count + fraction * (1 - 1 / count), 1.0)


def gap(gram: Tensor, weights: Tensor, cap: float) -> float:
    """How far the optimality conditions are from holding: weight moves only from a higher to a lower slope."""
    slope = gram @ weights
    falls, rises = slope[weights > 0].max(), slope[weights < cap]
    return float(falls - rises.min()) if len(rises) else 0.0


problems = st.tuples(st.integers(0, 10**6), st.integers(1, 32), st.integers(1, 12), st.floats(0, 1))


@prop
@given(problem=problems, rank=st.sampled_from([None, 1, 2, 5]), size=st.sampled_from([1e-9, 1.0, 1e6]))
def test_the_optimality_conditions(problem, rank, size):
    seed, count, dimension, fraction = problem
    vectors = size * vectors_of(seed, count, dimension, rank)
    gram, cap = vectors @ vectors.T, capped(count, fraction)
    weights = capped_simplex_weights(gram, cap)
    assert weights.dtype == torch.float64
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert float(weights.min()) >= 0
    assert float(weights.max()) <= cap + 1e-12
    assert gap(gram, weights, cap) <= 1e-10 * float(gram.abs().max())
    uniform = torch.full_like(weights, 1 / count)
    assert weights @ gram @ weights <= uniform @ gram @ uniform * (1 + 1e-12)


@pytest.mark.parametrize("difference", [1e-3, 1e-6, 1e-7, 1e-9, 1e-12])
def test_gradients_that_are_nearly_the_same(difference):
    """Their curvature is lost in rounding, their slope is not: the smaller of each pair has the weight."""
    for seed in range(5):
        vectors = vectors_of(seed, 4, 7)
        vectors = torch.cat([vectors, vectors * (1 + difference)])
        gram = vectors @ vectors.T
        weights = capped_simplex_weights(gram, 1.0)
        assert gap(gram, weights, 1.0) <= 1e-10 * float(gram.abs().max())


@settings(deadline=None, derandomize=True, max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 8), dimension=st.integers(1, 10), fraction=st.floats(0.05, 1))
def test_scipy_finds_no_better_solution(seed, count, dimension, fraction):
    vectors = vectors_of(seed, count, dimension)
    gram, cap = (vectors @ vectors.T).numpy(), capped(count, fraction)
    weights = capped_simplex_weights(torch.from_numpy(gram), cap).numpy()
    theirs = minimize(
        lambda a: 0.5 * a @ gram @ a,
        np.full(count, 1 / count),
        jac=lambda a: gram @ a,
        bounds=[(0, cap)] * count,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(count)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    ours = 0.5 * weights @ gram @ weights
    assert ours == pytest.approx(theirs.fun, abs=1e-6 * np.abs(gram).max())
    assert ours <= theirs.fun + 1e-9 * np.abs(gram).max()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cap"), [(3, 0.6), (4, 0.6), (5, 0.3), (6, 1.0)])
def test_a_one_class_support_vector_machine_agrees(count, cap):
    """The published solver: ν = 1/(C M), the dual coefficients over M ν."""
    svm = pytest.importorskip("sklearn.svm")
    for seed in range(5):
        vectors = vectors_of(seed, count, 10)
        gram = (vectors @ vectors.T).numpy()
        nu = 1 / (cap * count)
        machine = svm.OneClassSVM(kernel="precomputed", nu=nu, tol=1e-10).fit(gram)
        theirs = np.zeros(count)
        theirs[machine.support_] = machine.dual_coef_[0] / (count * nu)
        np.testing.assert_allclose(capped_simplex_weights(torch.from_numpy(gram), cap), theirs, atol=1e-6)


@prop
@given(seed=st.integers(0, 10**6), dimension=st.integers(1, 6), cap=st.floats(0.5, 1))
def test_two_weights_in_closed_form(seed, dimension, cap):
    first, second = vectors_of(seed, 2, dimension)
    best = float((second @ second - first @ second) / (first - second).square().sum())
    expected = min(max(best, 1 - cap), cap)
    gram = torch.stack([first, second]) @ torch.stack([first, second]).T
    weights = capped_simplex_weights(gram, cap)
    torch.testing.assert_close(weights, torch.tensor([expected, 1 - expected], dtype=torch.float64), rtol=0, atol=1e-9)


def test_by_hand():
    """The nearest point to 0 on the triangle of (1, 0), (0, 1) and (2, 2) is in the middle of the first two."""
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    gram = vectors @ vectors.T
    torch.testing.assert_close(capped_simplex_weights(gram, 1.0), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    expected = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    torch.testing.assert_close(capped_simplex_weights(gram, 0.4), expected)
    long = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))  # orthogonal: a_m is as 1 / ||g_m||²
    expected = torch.tensor([36.0, 9.0, 4.0], dtype=torch.float64) / 49
    torch.testing.assert_close(capped_simplex_weights(long, 1.0), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
def test_the_smallest_cap_makes_weights_equal(count):
    gram = torch.diag(torch.arange(1.0, count + 1))
    torch.testing.assert_close(capped_simplex_weights(gram, 1 / count), torch.full((count,), 1 / count).double())


@pytest.mark.parametrize("gram", [torch.zeros(4, 4), torch.ones(4, 4), 3e7 * torch.ones(4, 4)])
def test_undetermined_weights_are_equal(gram):
    torch.testing.assert_close(capped_simplex_weights(gram, 0.6), torch.full((4,), 0.25).double())


@pytest.mark.parametrize(
    ("gram", "cap", "message"),
    [
        (torch.eye(4), 0.2, r"cap .* got 0.2"),
        (torch.eye(4), 1.5, "cap .* got 1.5"),
        (torch.eye(4), math.nan, "cap .* got nan"),
        (torch.ones(4), 1.0, r"matrix \(M, M\), got \(4,\)"),
        (torch.ones(2, 3), 1.0, r"matrix \(M, M\), got \(2, 3\)"),
        (torch.ones(0, 0), 1.0, r"matrix \(M, M\), got \(0, 0\)"),
        (torch.full((2, 2), math.nan), 1.0, "must be finite"),
    ],
)
def test_invalid_problems(gram, cap, message):
    with pytest.raises(EnfoldError, match=message):
        capped_simplex_weights(gram, cap)
