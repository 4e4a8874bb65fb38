"""Symmetries of networks with several inputs, dictionaries, objects, masks and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from enfold.errors import EnfoldError
from enfold.symmetry import permute, symmetries

IDS = torch.arange(1, 13).view(3, 4)
FULL = torch.ones(3, 4, dtype=torch.long)


class Masked(nn.Module):
    """Tokens with a mask on which the network branches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words, self.first = nn.Embedding(20, 5), nn.Linear(5, 6)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        if kind == "unused":
            self.other = nn.Linear(6, 3)

    def forward(self, ids, mask):
        first = torch.relu(self.first(self.words(ids)))
        hidden = torch.relu(self.middle(first))
        if self.kind == "written":  # a mask into which values of the network are written
            weights = torch.zeros_like(mask)
            weights[:, :1] = (hidden[..., 0] > 0).long()[:, :1]
            return self.last(hidden) if weights[0, 0].item() else self.last(torch.tanh(hidden))
        if mask.all():
            return self.last(hidden)
        if self.kind == "same":
            return self.last(hidden * mask[..., None])
        return self.other(hidden) if self.kind == "unused" else self.last(hidden + first)  # "joined"


def sizes(network: nn.Module, example: object) -> list[int]:
    return sorted(group.size for group in symmetries(network, example).groups)


def test_a_branch_on_a_mask_does_not_depend_on_the_order_of_units():
    network = Masked("same").eval()
    assert sizes(network, {"ids": IDS, "mask": FULL}) == [5, 6, 6]
    padded = FULL.clone()
    padded[0, 2:] = 0
    assert sizes(network, (IDS, padded)) == [5, 6, 6]


def test_groups_that_do_not_hold_for_other_masks_are_refused():
    assert sizes(Masked("joined"), (IDS, FULL)) == [5]
    padded = FULL.clone()
    padded[0, 2:] = 0
    assert 6 not in sizes(Masked("joined"), (IDS, torch.ones(3, 4, dtype=torch.bool)))
    assert sizes(Masked("joined"), (IDS, padded))[0] == 5


@pytest.mark.parametrize("kind", ["unused", "written"])
def test_branches_that_may_use_other_values_are_refused(kind):
    symmetry = symmetries(Masked(kind), (IDS, FULL))
    assert not symmetry.groups
    assert "decides by a value" in symmetry.note


class Packed(nn.Module):
    """A recurrent network on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.last = nn.Embedding(20, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.last(hidden)


def test_packed_sequences():
    network, inputs = Packed().eval(), (IDS, torch.tensor([4, 2, 3]))
    symmetry = symmetries(network, inputs)
    assert sorted(group.size for group in symmetry.groups) == [5, 6]
    expected = network(*inputs)
    orders = {group.name: torch.arange(group.size).flip(0) for group in symmetry.groups}
    network.load_state_dict(permute(dict(network.state_dict()), symmetry, orders))
    torch.testing.assert_close(network(*inputs), expected)


@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor
    size: int


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, graph):
        hidden = torch.relu(self.first(graph.x))
        source, target = graph.edges
        degree = torch.zeros(graph.size).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        return self.last(torch.zeros(graph.size, 6).index_add(0, target, hidden[source]) / degree.sqrt()[:, None])


def test_a_graph():
    graph = Graph(torch.zeros(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    assert sizes(Convolution(), graph) == [6]
    assert not graph.x.any()  # unchanged


def test_floating_point_inputs_that_must_be_positive():
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x, weight):
            return self.last(torch.relu(self.first(x)) * weight.sqrt())

    assert sizes(Roots(), (torch.ones(2, 3), torch.ones(2, 1))) == [6]


def test_an_example_without_tensors_is_refused():
    for example in ({}, (), {"x": "text"}, object()):
        with pytest.raises(EnfoldError, match="example must be a batch of inputs"):
            symmetries(nn.Linear(3, 2), example)
