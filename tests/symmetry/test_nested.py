"""Heads and the units inside them: which groups belong together, and the best order of all of them at once."""

from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from known_networks import KNOWN, made, symmetry_of
from torch import Tensor, nn

from enfold.symmetry import match_weights, permute, symmetries
from enfold.symmetry.climb import climb_orders
from enfold.symmetry.gains import Products
from enfold.symmetry.nested import nests


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("vit", 4), ("attention", 2), ("rotary", 1), ("mlp", 0), ("cnn", 0), ("grouped queries", 3),
        ("one head of keys", 0), ("experts", 1), ("experts last", 1), ("separable", 5), ("experts of blocks", 3),
    ],
)  # fmt: skip
def test_each_head_has_the_groups_inside_it(name, inside):
    symmetry = symmetry_of(name)
    found = nests(symmetry)
    assert sum(len(nest.inside) for nest in found) == inside
    for nest in found:
        for kind in nest.inside:
            assert len(kind) == nest.outer.size
            assert len({group.size for group in kind}) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_every_group_is_in_one_nest(name):
    symmetry = symmetry_of(name)
    names = [group.name for nest in nests(symmetry) for group in nest.groups]
    assert sorted(names) == sorted(group.name for group in symmetry.groups)


def test_what_is_inside_a_unit_may_be_blocks_again():
    (nest,) = (nest for nest in nests(symmetry_of("separable")) if nest.inside)  # groups of a grouped convolution
    channels, *rest = nests(nest.each)  # of the first convolution; each of them is two of the second
    assert (channels.outer.size, [kind[0].size for kind in channels.inside]) == (3, [2])
    assert [one.outer.size for one in rest] == [4]


def test_blocks_of_one_expert_hold_no_units_of_another():
    symmetry = symmetry_of("experts of blocks")
    apart = replace(symmetry, groups=tuple(group for group in symmetry.groups if group.size != 3))
    found = [nest for nest in nests(apart) if nest.inside]
    assert len(found) == 3
    assert all(
        {axis.within for axis in nest.outer.axes} == {axis.within for one in nest.groups for axis in one.axes}
        for nest in found
    )


@pytest.mark.parametrize("name", ["grouped queries", "experts", "packed attention"])
def test_a_unit_is_the_same_weights_wherever_it_lies(name):
    state = dict(made(name)[0].state_dict())
    (nest,) = (nest for nest in nests(symmetry_of(name)) if nest.inside)
    last = nest.outer.size - 1
    there = permute(state, symmetry_of(name), {nest.outer.name: torch.arange(nest.outer.size).flip(0)})
    for kind, group in zip(nest.inside, nest.each, strict=True):
        order = torch.arange(group.size).flip(0)
        outside = permute(state, symmetry_of(name), {kind[last].name: order})
        inside = permute(nest.unit(there, 0, state), nest.each, {group.name: order})
        torch.testing.assert_close(inside, nest.unit(outside, last, state), rtol=0, atol=0)


class SingleModelWarning(nn.Module):
    """Attention with two heads of two units, and nothing else that may be permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attend(inputs, inputs, inputs)[0]


def drawn(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=source) for name, t in SingleModelWarning().state_dict().items()}


def agreement(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] * other[name]).sum()) for name in one)


@pytest.mark.parametrize("seed", range(4))
def test_heads_and_what_is_inside_are_matched_as_well_as_can_be(seed):
    symmetry = symmetries(SingleModelWarning(), torch.randn(2, 3, 4))
    assert [group.size for group in symmetry.groups] == [2] * 5
    goal, other = drawn(seed), drawn(seed + 100)
    ways = product(permutations(range(2)), repeat=5)
    every = [
        permute(other, symmetry, {g.name: torch.tensor(order) for g, order in zip(symmetry.groups, way, strict=True)})
        for way in ways
    ]
    best = max(agreement(goal, state) for state in every)
    found = permute(other, symmetry, match_weights(goal, other, symmetry))
    assert agreement(goal, found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["vit", "packed attention", "rotary", "separable", "resnet", "grouped queries", "experts"]
)
def test_a_step_gains_what_it_says(name):
    network, _ = made(name)
    symmetry, state = symmetry_of(name), {n: t.double() for n, t in network.state_dict().items() if "num_" not in n}
    source = torch.Generator().manual_seed(3)
    goal = {n: torch.randn(t.shape, generator=source, dtype=torch.float64) for n, t in state.items()}
    nested = nests(symmetry)
    products = Products(goal, state, nested, climb_orders)
    for index, nest in enumerate(nested):
        if index in products.beside[index]:
            continue  # a tensor has the group on two axes: the gain is that of the linear part
        step = products.best(state, index, products.names[index])
        moved = permute(state, symmetry, {nest.outer.name: step.moves[0][1]})
        for group, order in step.moves[1:]:
            moved = permute(moved, symmetry, {group.name: order})
        assert agreement(goal, moved) - agreement(goal, state) == pytest.approx(step.gain, abs=1e-9)
        assert step.gain >= 0
