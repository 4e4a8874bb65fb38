"""Heads and the units inside them: nesting of groups and joint matching."""

from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from known_networks import KNOWN, made, symmetry_of
from torch import Tensor, nn

from enfold.symmetry import match_weights, permute, symmetries
from enfold.symmetry.ascent import ascend
from enfold.symmetry.assignment import GainMatrices
from enfold.symmetry.nested import group_trees


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("vit", 4), ("attention", 2), ("rotary", 1), ("mlp", 0), ("cnn", 0), ("grouped queries", 3),
        ("one head of keys", 0), ("experts", 1), ("experts last", 1), ("separable", 5), ("experts of blocks", 3),
    ],
)  # fmt: skip
def test_each_head_has_the_groups_inside_it(name, inside):
    symmetry = symmetry_of(name)
    found = group_trees(symmetry)
    assert sum(len(tree.inside) for tree in found) == inside
    for tree in found:
        for kind in tree.inside:
            assert len(kind) == tree.outer.size
            assert len({group.size for group in kind}) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_every_group_is_in_one_tree(name):
    symmetry = symmetry_of(name)
    names = [group.name for tree in group_trees(symmetry) for group in tree.groups]
    assert sorted(names) == sorted(group.name for group in symmetry.groups)


def test_units_may_contain_nested_blocks():
    (tree,) = (tree for tree in group_trees(symmetry_of("separable")) if tree.inside)  # groups of a grouped convolution
    channels, *rest = group_trees(tree.each)  # of the first convolution; each of them is two of the second
    assert (channels.outer.size, [kind[0].size for kind in channels.inside]) == (3, [2])
    assert [one.outer.size for one in rest] == [4]


def test_blocks_of_one_expert_contain_no_units_of_another():
    symmetry = symmetry_of("experts of blocks")
    apart = replace(symmetry, groups=tuple(group for group in symmetry.groups if group.size != 3))
    found = [tree for tree in group_trees(apart) if tree.inside]
    assert len(found) == 3
    assert all(
        {axis.within for axis in tree.outer.axes} == {axis.within for one in tree.groups for axis in one.axes}
        for tree in found
    )


@pytest.mark.parametrize("name", ["grouped queries", "experts", "packed attention"])
def test_a_unit_has_the_same_weights_at_any_position(name):
    state = dict(made(name)[0].state_dict())
    (tree,) = (tree for tree in group_trees(symmetry_of(name)) if tree.inside)
    last = tree.outer.size - 1
    there = permute(state, symmetry_of(name), {tree.outer.name: torch.arange(tree.outer.size).flip(0)})
    for kind, group in zip(tree.inside, tree.each, strict=True):
        order = torch.arange(group.size).flip(0)
        outside = permute(state, symmetry_of(name), {kind[last].name: order})
        inside = permute(tree.unit(there, 0, state), tree.each, {group.name: order})
        torch.testing.assert_close(inside, tree.unit(outside, last, state), rtol=0, atol=0)


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
def test_heads_and_their_units_are_matched_optimally(seed):
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
def test_a_step_has_the_predicted_gain(name):
    network, _ = made(name)
    symmetry, state = symmetry_of(name), {n: t.double() for n, t in network.state_dict().items() if "num_" not in n}
    source = torch.Generator().manual_seed(3)
    goal = {n: torch.randn(t.shape, generator=source, dtype=torch.float64) for n, t in state.items()}
    nested = group_trees(symmetry)
    products = GainMatrices(goal, state, nested, ascend)
    for index, tree in enumerate(nested):
        if index in products.beside[index]:
            continue  # a tensor has the group on two axes: the gain is that of the linear part
        step = products.best(state, index, products.names[index])
        moved = permute(state, symmetry, {tree.outer.name: step.moves[0][1]})
        for group, order in step.moves[1:]:
            moved = permute(moved, symmetry, {group.name: order})
        assert agreement(goal, moved) - agreement(goal, state) == pytest.approx(step.gain, abs=1e-9)
        assert step.gain >= 0
