"""The basin check: barriers by hand, and one basin or several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from enfold.errors import EnfoldError
from enfold.merge import basin_check
from enfold.tasks.regression import Regression
from enfold.train import TrainConfig, fit
from fine_tuned import family, images


def test_barriers_by_hand():
    inputs, labels = torch.randn(30, 3), torch.arange(30) % 3
    layers = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(3)]
    found = basin_check(layers, (inputs, labels), points=4)
    states = [layer.state_dict() for layer in layers]

    @torch.no_grad()
    def loss(one: int, other: int, alpha: float) -> float:
        network = copy.deepcopy(layers[0])
        network.load_state_dict({k: (1 - alpha) * t + alpha * states[other][k] for k, t in states[one].items()})
        return float(cross_entropy(network(inputs), labels))

    for (one, other), barrier in found.barriers.items():
        ends = loss(one, other, 0), loss(one, other, 1)
        excess = [loss(one, other, a) - (1 - a) * ends[0] - a * ends[1] for a in (1 / 3, 2 / 3)]
        assert barrier == pytest.approx(max(0.0, *excess), abs=1e-5)
    assert found.losses == pytest.approx([loss(index, 0, 0) for index in range(3)], rel=1e-5)
    constants = [float(cross_entropy(each(inputs).detach().mean(0).expand(30, 3), labels)) for each in layers]
    assert found.scale == pytest.approx(sum(constants) / 3 - sum(found.losses) / 3, abs=1e-5)
    assert found.examples == 30
    assert (found.unit, len(found.barriers)) == ("nats", 3)


def test_members_are_one_basin_or_two(members, data):
    near = [members.member(0) for _ in range(3)]
    with torch.no_grad():
        for network in near:
            for parameter in network.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    found = basin_check(near, data)
    assert found.is_one_basin
    assert "one basin" in str(found)


def test_permuted_units_are_another_basin():
    torch.manual_seed(0)
    inputs = torch.randn(300, 2)
    labels = (inputs.prod(1) > 0).long()
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    fit(network, (inputs, labels), config=TrainConfig(epochs=60, batch_size=32, lr=0.02, select="last"), quiet=True)
    other, order = copy.deepcopy(network), torch.arange(16).roll(1)
    with torch.no_grad():
        for layer, axis in ((other[0], 0), (other[2], 1)):
            layer.weight.copy_(layer.weight.index_select(axis, order))
        other[0].bias.copy_(other[0].bias[order])
    found = basin_check([network, other], (inputs, labels))
    assert not found.is_one_basin
    assert "different basins" in str(found)
    assert basin_check([network, network], (inputs, labels)).largest == 0.0


def test_statistics_are_measured_between_members(snapshot):
    _, members = family(spread=0.5)
    unchanged = [snapshot(member) for member in members]
    plain, measured = basin_check(members, images()), basin_check(members, images(), images())
    assert plain.losses == measured.losses
    assert plain.barriers != measured.barriers
    assert all(check() for check in unchanged)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "unit"),
    [
        ("regression", 1, torch.randn(30, 1), "mse"),
        (Regression(head="gaussian", variance="log"), 2, torch.randn(30, 1), "nats"),
        ("binary", 1, torch.randint(2, (30, 1)), "nats"),
        ("multilabel", 4, torch.randint(2, (30, 4)), "nats"),
    ],
    ids=["regression", "gaussian", "binary", "multilabel"],
)
def test_any_task(task, outputs, targets, unit):
    layers = [nn.Linear(3, outputs) for _ in range(2)]
    found = basin_check(layers, (torch.randn(30, 3), targets), task=task)
    assert found.unit == unit
    assert found.largest == pytest.approx(0.0, abs=1e-5)  # losses are convex in a linear layer


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.layer(first + second)


def test_any_loader():
    inputs, labels = torch.randn(30, 3), torch.arange(30) % 3
    layers = [nn.Linear(3, 3) for _ in range(2)]
    expected = basin_check(layers, (inputs, labels)).losses
    loader = DataLoader(TensorDataset(inputs, labels), 7)
    assert basin_check(layers, loader, loader).losses == pytest.approx(expected, rel=1e-5)
    dictionaries = [{"first": inputs[:15], "second": inputs[15:], "labels": labels[:15]}]
    assert basin_check([Dictionary() for _ in range(2)], dictionaries).examples == 15


def test_few_examples_and_one_member():
    inputs, labels = torch.randn(300, 3), torch.arange(300) % 3
    found = basin_check([nn.Linear(3, 3)], (inputs, labels), examples=20)
    assert (found.examples, found.barriers, found.is_one_basin) == (20, {}, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (1,)), "models"),
        (([nn.Linear(2, 2)], None), "val"),
        (([nn.Linear(2, 2), nn.Linear(3, 2)], []), "architecture"),
    ],
    ids=["models", "val", "architectures"],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(EnfoldError, match=message):
        basin_check(*arguments)


def test_empty_validation_data():
    with pytest.raises(EnfoldError, match="val"):
        basin_check([nn.Linear(2, 2)], [])
