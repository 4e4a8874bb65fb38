"""Units that meet in a product: matrices other than permutations keep it, if one side is divided by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from enfold.engines.skeleton import read_state
from enfold.merge.common.soft import mix_units
from enfold.symmetry import Symmetry, symmetries


class Attention(nn.Module):
    """Two heads; with `shared`, one of keys and values for both; with `between`, something before they meet."""

    def __init__(self, between: nn.Module | None = None, shared: bool = False) -> None:
        super().__init__()
        self.heads = 1 if shared else 2
        self.query, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.key, self.value = nn.Linear(8, 4 * self.heads), nn.Linear(8, 4 * self.heads)
        self.between = nn.Identity() if between is None else between

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys, values = (
            layer(inputs).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (self.between(queries) @ self.between(keys).mT).softmax(-1)
        return self.head(self.out((weights @ values).transpose(1, 2).flatten(2)).mean(1))


class Block(Attention):
    """The same, for another one to follow."""

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys, values = (
            layer(inputs).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (self.between(queries) @ self.between(keys).mT).softmax(-1)
        return inputs + self.out((weights @ values).transpose(1, 2).flatten(2))


class Counted(nn.Module):
    """Contracted units, one side multiplied by integers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.times = nn.Linear(8, 4), nn.Linear(8, 4), nn.Module()
        self.times.register_buffer("weight", torch.arange(1, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((self.query(inputs) * self.times.weight) @ self.key(inputs).mT).mean(1)


def test_integers_cannot_be_multiplied_by_matrices():
    symmetry = symmetries(Counted(), EXAMPLE)
    assert [group.size for group in symmetry] == [4]
    assert not met(symmetry)


class Packed(nn.Module):
    """Torch's own, with queries, keys and values in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.attention(inputs, inputs, inputs, need_weights=False)[0].mean(1))


EXAMPLE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def met(symmetry: Symmetry) -> list[str]:
    """The groups in which some axis meets the others."""
    return [group.name for group in symmetry if any(axis.role == "meets" for axis in group.axes)]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Attention, ["query", "query from 4"]),
        (lambda: Attention(shared=True), ["query from 0"]),
        (Packed, ["attention.in_proj_weight", "attention.in_proj_weight from 4"]),
    ],
    ids=["heads", "shared", "packed"],
)
def test_any_matrix_preserves_bilinear_units(make, names):
    network = make().double().eval()
    symmetry = symmetries(network, EXAMPLE)
    assert met(symmetry) == names
    groups = [symmetry[name] for name in names]
    matrices = [torch.eye(group.size) + 0.3 * torch.rand(group.size, group.size) for group in groups]
    expected = network(EXAMPLE)
    network.load_state_dict(mix_units(read_state(network), groups, [matrix.double() for matrix in matrices]))
    torch.testing.assert_close(network(EXAMPLE), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("between", [nn.LayerNorm(4, elementwise_affine=False), nn.Tanh()], ids=["norm", "tanh"])
def test_only_permutations_commute_with_operations_in_between(between):
    symmetry = symmetries(Attention(between), EXAMPLE)
    assert not met(symmetry)
    both = symmetries(nn.Sequential(Block(), Block(between), nn.Flatten(), nn.Linear(40, 3)), EXAMPLE)
    assert met(both) == ["0.query", "0.query from 4"], "a block is not kept from it by another one"
    assert {axis.role for axis in symmetry["query"].axes} == {"produces"}
