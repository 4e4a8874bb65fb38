"""What every merge with the option `repair` keeps to with batch norms, repairs, and a single member."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from enfold.engines.skeleton import read_state
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import repair
from enfold.merge.common.states import states_of
from enfold.registry import methods
from enfold.symmetry import match_state, symmetries
from enfold.train import TrainConfig
from fine_tuned import BASED, moved
from planted import convolutional, drawn, pixels

PLAN = TrainConfig(epochs=1, batch_size=32, optimizer="adam", weight_decay=0.0, select="last")
MERGES = {name: each.target for name, each in methods("merge").items() if "repair" in each.arguments}
BRIEF = {"perm_avg": {"config": PLAN, "matched": 12.0}, "straight_through": {"epochs": 2}, "soup": {"kind": "uniform"}}
BRIEF |= {"wise_ft": {"alpha": 0.7}, "fisher": {"examples": 16}}
DATA = pixels()
NORM, HIDDEN = "1", ("0", "4")  # the batch norm, and the convolutions, of which it follows the first and undoes repairs
every_merge = pytest.mark.parametrize("name", MERGES)


def run(name: str, members: DeepEnsemble, **options: object) -> nn.Module:
    """The result of a merge, with short training if it trains, and members' moved weights as the base it needs."""
    base = {"base": moved(members.member(0))} if name in BASED else {}
    return MERGES[name](members, DATA, **{**BRIEF.get(name, {}), **base, **options})


def some_members(count: int) -> DeepEnsemble:
    return DeepEnsemble([drawn(convolutional, seed) for seed in range(count)])


@cache
def merged(name: str) -> nn.Module:
    """Three members, merged."""
    return run(name, some_members(3))


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@torch.no_grad()
def statistics(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and spreads of what the hidden layers return for the training part."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hidden = DATA.train.inputs
    for name, layer in network.eval().named_children():
        hidden = layer(hidden)
        if name in HIDDEN:
            units = hidden.transpose(0, 1).flatten(1).double()
            seen[name] = units.mean(1), units.std(1)
    return seen


def assert_measured(network: nn.Module) -> None:
    """The batch norm holds what it sees on the training part."""
    norm, (mean, spread) = network.get_submodule(NORM), statistics(network)["0"]
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), spread.square(), rtol=1e-4, atol=1e-5)


def goals(network: nn.Module, members: DeepEnsemble) -> dict[str, tuple[Tensor, Tensor]]:
    """The means, over members in the orders nearest to the network's, of their means and spreads."""
    symmetry, own = symmetries(network, DATA.train.inputs[:2]), read_state(network)
    learned = {name for name, _ in network.named_parameters()}
    near = [members.network(match_state(own, state, symmetry, learned=learned)) for state in states_of(members)]
    seen = [statistics(member) for member in near]
    return {name: tuple(torch.stack([one[name][k] for one in seen]).mean(0) for k in (0, 1)) for name in HIDDEN}


@every_merge
def test_statistics_of_batch_norms_are_measured_for_the_merged_network(name):
    network = merged(name)
    assert_measured(network)
    again = repair(run(name, some_members(3), repair="none"), some_members(3), DATA, kind="reset")
    if name != "perm_avg":  # it also learns with statistics that fit
        assert_same(again, network)


@every_merge
def test_statistics_of_instance_norms_are_measured_for_the_merged_network(name):
    def make() -> nn.Module:
        norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
        )

    network = run(name, DeepEnsemble([drawn(make, seed) for seed in range(3)]))
    with torch.no_grad():
        units = network[0](DATA.train.inputs)
    torch.testing.assert_close(network[1].running_mean, units.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network[1].running_var, units.var((2, 3)).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@every_merge
def test_a_repair_is_a_function_or_an_option(name):
    members = some_members(3)
    expected = repair(merged(name), members, DATA)
    assert_same(run(name, members, repair="repair"), expected)


@pytest.mark.combinations
@every_merge
@pytest.mark.parametrize("kind", ["repair", "rescale"])
def test_repaired_units_have_the_means_and_spreads_of_the_members(name, kind):
    members, before = some_members(3), merged(name)
    network = repair(before, members, DATA, kind=kind)
    seen, wanted, plain = statistics(network), goals(before, members), statistics(before)
    assert_measured(network)
    assert torch.equal(network[0].weight, before[0].weight)
    assert not torch.allclose(plain["4"][1], wanted["4"][1], rtol=0.05)  # there was something to repair
    torch.testing.assert_close(seen["4"][1], wanted["4"][1], rtol=1e-5, atol=1e-6)
    expected = wanted["4"][0] if kind == "repair" else plain["4"][0]
    torch.testing.assert_close(seen["4"][0], expected, rtol=1e-5, atol=1e-5)


@every_merge
def test_a_member_that_is_not_finite_is_named(name):
    networks = [some_members(3).member(index) for index in range(3)]
    networks[1].get_parameter(next(name for name, _ in networks[1].named_parameters())).data[0] = math.nan
    with pytest.raises(EnfoldError, match="of member 1 is not"):
        run(name, DeepEnsemble(networks))


@every_merge
def test_a_single_member_is_returned_unchanged(name):
    members, expected = some_members(1).train(), drawn(convolutional)
    own = {"base": moved(expected)} if name in BASED else {}
    own |= {"alpha": 1.0} if name == "wise_ft" else {}
    for settings in (own, {"repair": "repair", **own}):
        network = MERGES[name](members, DATA, **settings)
        assert not network.training
        assert_same(network, expected)
        with torch.no_grad():
            for tensor in (*network.parameters(), *network.buffers()):
                tensor.add_(1)
        assert_same(members.member(0), expected)  # what was returned shares nothing with it
