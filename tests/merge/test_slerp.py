"""Spherical means: SLERP of two members and the Karcher mean of more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from enfold.errors import EnfoldError
from enfold.merge import slerp
from enfold.merge.slerp import spherical_mean
from fine_tuned import family, flat, images, merged


def reference(one: np.ndarray, other: np.ndarray, t: float) -> np.ndarray:
    lengths = np.linalg.norm(one), np.linalg.norm(other)
    first, second = one / lengths[0], other / lengths[1]
    omega = math.acos(np.clip(first.ravel() @ second.ravel(), -1, 1))
    direction = (math.sin((1 - t) * omega) * first + math.sin(t * omega) * second) / math.sin(omega)
    return ((1 - t) * lengths[0] + t * lengths[1]) * direction


@pytest.mark.parametrize("t", [0.2, 0.5])
@pytest.mark.parametrize("is_centred", [False, True])
def test_two_members(t, is_centred):
    base, members = family(count=2)
    found = flat(slerp(members, images(), t=t, base=base if is_centred else None))
    start, one, other = flat(base), *map(flat, members)
    for name, tensor in found.items():
        middle = start[name].numpy() if is_centred else np.zeros(tensor.shape)
        a, b = one[name].numpy() - middle, other[name].numpy() - middle
        if not np.linalg.norm(a):
            continue
        np.testing.assert_allclose(tensor.numpy(), middle + reference(a, b, t), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("t", [0, 1])
def test_the_ends_are_the_members(t):
    base, members = family(count=2)
    found = merged("slerp", members, base, t=float(t))
    assert all(torch.equal(found.state_dict()[key], v) for key, v in members[t].state_dict().items())


def test_the_karcher_mean_has_no_first_order_improvement():
    source = torch.Generator().manual_seed(0)
    vectors = torch.randn(5, 7, generator=source).double() + 0.5
    found = spherical_mean(vectors, [0.2] * 5)
    assert float(found.norm()) == pytest.approx(float(vectors.norm(dim=1).mean()))
    units = vectors / vectors.norm(dim=1, keepdim=True)

    def spread(point: torch.Tensor) -> float:
        return float((units @ (point / point.norm())).clamp(-1, 1).arccos().square().sum())

    for _ in range(50):
        assert spread(found + 1e-3 * torch.randn(7, generator=source).double()) > spread(found) - 1e-12


def test_three_orthogonal_axes():
    torch.testing.assert_close(spherical_mean(torch.eye(3).double(), [1 / 3] * 3), torch.full((3,), 3**-0.5).double())


def test_tensors_without_a_direction_between_them_are_averaged():
    vectors = torch.tensor([[1.0, 0.0], [-3.0, 0.0]]).double()
    torch.testing.assert_close(spherical_mean(vectors, [0.5, 0.5]), vectors.mean(0))
    torch.testing.assert_close(
        spherical_mean(vectors * torch.tensor([[0.0], [1.0]]), [0.5, 0.5]), torch.tensor([-1.5, 0.0]).double()
    )


def test_a_position_is_for_two_members():
    with pytest.raises(EnfoldError, match="t must"):
        slerp([nn.Linear(2, 2) for _ in range(3)], t=0.2)
