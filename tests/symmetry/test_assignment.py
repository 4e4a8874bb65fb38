"""Assignments are optimal, whatever the solver starts from."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from enfold.symmetry.assignment import SMALL, solve_assignment


def gains(kind, size, dtype):
    source = torch.Generator().manual_seed(size)
    noise = torch.randn(size, size, generator=source, dtype=dtype)
    return {
        "noise": noise,
        "of low rank": noise[:, :3] @ noise[:3] * 1e-3 + 4.0,
        "equal": torch.ones(size, size, dtype=dtype),
        "of few values": noise.sign() + noise.mT.sign(),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, SMALL - 1, SMALL, 300])
@pytest.mark.parametrize("kind", ["noise", "of low rank", "equal", "of few values"])
def test_an_assignment_has_the_largest_sum(kind, size, dtype):
    given = gains(kind, size, dtype)
    order = solve_assignment(given)
    assert torch.equal(order.sort().values, torch.arange(size))
    rows, columns = linear_sum_assignment(given.double().numpy(), maximize=True)
    expected = given.double()[rows, columns].sum()
    assert float(given.double()[torch.arange(size), order].sum()) == pytest.approx(float(expected), rel=1e-12)


def test_permuted_units_are_found():
    order = torch.randperm(SMALL, generator=torch.Generator().manual_seed(0))
    units = torch.randn(SMALL, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(solve_assignment(units[order] @ units.mT), order)
