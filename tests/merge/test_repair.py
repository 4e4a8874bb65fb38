"""REPAIR: hidden units get the members' means and spreads, and the network keeps its class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from enfold.data import Data
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, average, repair, weight_matching
from enfold.merge.common import spreads
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import hidden_layers, repair_layers
from enfold.networks import MLP
from enfold.symmetry import symmetries
from planted import NETWORKS, drawn, pixels, planted


def before_activation(network: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """What each hidden linear layer of an MLP returns."""
    found, values = [], inputs.flatten(1)
    for layer in network.hidden:
        values = layer(values)
        found.append(values.detach())
        values = torch.relu(values)
    return found


def statistics(network: nn.Module, inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(units.mean(0), units.std(0, correction=0)) for units in before_activation(network, inputs)]


def deep(count: int) -> tuple[DeepEnsemble, torch.Tensor]:
    make, shape = NETWORKS["deep"]
    return DeepEnsemble([drawn(make, seed) for seed in range(count)]), pixels(shape)


@pytest.mark.parametrize("kind", ["repair", "rescale"])
def test_units_have_the_mean_of_the_members_statistics(kind):
    members, data = deep(3)
    matched = align(members, data)
    network = average(matched, data)
    names = hidden_layers(network, symmetries(network, data.train.inputs[:2]))
    assert names == ["hidden.0", "hidden.1", "hidden.2"]
    inputs = data.train.inputs
    goals = [statistics(member, inputs) for member in matched]
    repair_layers(network, list(matched), data, names, kind)
    for layer, (mean, spread) in enumerate(statistics(network, inputs)):
        torch.testing.assert_close(spread, torch.stack([g[layer][1] for g in goals]).mean(0), rtol=1e-3, atol=1e-4)
        wanted = torch.stack([goal[layer][0] for goal in goals]).mean(0)
        if kind == "repair":
            torch.testing.assert_close(mean, wanted, rtol=1e-3, atol=1e-4)
        else:  # as it was behind the layers that are right already
            behind = average(matched, data)
            repair_layers(behind, list(matched), data, names[:layer], kind)
            torch.testing.assert_close(mean, statistics(behind, inputs)[layer][0], rtol=1e-3, atol=1e-4)
            assert torch.allclose(mean, wanted, rtol=0.05) == (layer == 0)  # the mean of what is linear is the goal


def test_averaging_reduces_deviations_according_to_the_correlation():
    """√((1 + (M-1) ρ) / M) with ρ = 0 in the first layer, where inputs are the same and weights are independent."""
    torch.manual_seed(0)
    members = DeepEnsemble([nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 3)) for _ in range(4)])
    data = pixels((40,), 200)
    spreads = [member[0](data.train.inputs).std(0).mean().item() for member in members]
    averaged = average(members, data)[0](data.train.inputs).std(0).mean().item()
    assert averaged / (sum(spreads) / 4) == pytest.approx(math.sqrt(1 / 4), rel=0.05)


@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional"])
@pytest.mark.parametrize("kind", ["repair", "rescale"])
def test_a_member_needs_no_repair(name, kind):
    """Copies in any order already have the target statistics."""
    members, network, data = planted(name, 3)
    fitting = repair(network, members, data, kind="reset")
    repaired = repair(fitting, DeepEnsemble([fitting] * 2), data, kind=kind)
    torch.testing.assert_close(dict(repaired.state_dict()), dict(fitting.state_dict()), rtol=1e-3, atol=2e-3)


def test_members_are_matched_to_the_network_first():
    """The goals of a unit are those of the members' units that it is made of, wherever they are."""
    members, data = deep(2)
    network = weight_matching(members, data)
    one, other = (repair(network, given, data) for given in (members, align(members, data)))
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()))


def test_as_an_option_and_as_a_step():
    members, data = deep(3)
    option = weight_matching(members, data, repair="repair")
    step = repair(weight_matching(members, data, repair="none"), members, data)
    assert all(torch.equal(step.state_dict()[name], tensor) for name, tensor in option.state_dict().items())
    spread, plain = (
        statistics(network, data.train.inputs)[2][1].mean() for network in (option, weight_matching(members, data))
    )
    assert spread > 1.2 * plain


def test_batch_norm_is_measured_after_repaired_layers():
    """A normed layer needs nothing else: its units have the mean of the members' scales as their spreads."""
    torch.manual_seed(0)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))

    data = pixels((4,), 60)
    members = DeepEnsemble([drawn(make, seed) for seed in range(3)])
    matched = align(members, data)
    network = weight_matching(members, data, repair="repair")
    units = network[:2](data.train.inputs).detach()
    scales = torch.stack([member[1].weight for member in matched]).mean(0).detach()
    torch.testing.assert_close(units.std(0), scales, rtol=1e-3, atol=1e-4)
    goals = torch.stack([member[:4](data.train.inputs).std(0).detach() for member in matched]).mean(0)
    assert not torch.allclose(weight_matching(members, data)[:4](data.train.inputs).std(0), goals, rtol=0.05)
    torch.testing.assert_close(network[:4](data.train.inputs).std(0), goals, rtol=0.05, atol=1e-3)


def test_a_layer_without_a_bias_is_rescaled_and_keeps_its_parameters():
    data = pixels((4,), 60)
    layers = nn.Linear(4, 9, bias=False), nn.ReLU(), nn.Linear(9, 3)
    members = DeepEnsemble(nn.Sequential(*layers), 3)
    network = weight_matching(members, data, repair="repair")
    assert network[0].bias is None
    spreads = torch.stack([m[0](data.train.inputs).std(0) for m in align(members, data)]).mean(0).detach()
    torch.testing.assert_close(network[0](data.train.inputs).std(0).detach(), spreads, rtol=1e-3, atol=1e-4)


def test_a_constant_unit_is_only_shifted():
    data = pixels((4,), 60)
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        network[0].weight[2] = 0.0
    repaired = repair(network, DeepEnsemble([network, network]), data)
    torch.testing.assert_close(dict(repaired.state_dict()), dict(network.state_dict()), rtol=1e-4, atol=1e-5)


def test_layers_that_are_not_hidden_or_tied_are_unchanged():
    shared = nn.Linear(5, 5)
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(5, 3))
    network.again = nn.Linear(4, 5)  # never called, and its weight is the first layer's
    network.again.weight = network[0].weight
    symmetry = symmetries(nn.Sequential(*list(network)[:7]), torch.randn(2, 4))
    assert "6" not in hidden_layers(network, symmetry)
    assert "0" not in hidden_layers(network, symmetry)


def test_the_given_network_is_not_modified():
    members, data = deep(2)
    network = average(members, data)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    repair(network, members, data)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    same = repair(network, members, data, kind="none")
    assert same is not network
    assert all(torch.equal(before[name], tensor) for name, tensor in same.state_dict().items())


def test_unknown_kinds_are_refused():
    with pytest.raises(EnfoldError, match="kind"):
        repair(nn.Linear(2, 2), None, None, kind="glue")


def test_repair_equals_batch_norms_with_the_members_statistics():
    """As published: batch norms behind the hidden layers, with the goals as shift and scale, folded into the layers."""
    members, data = deep(3)
    network, inputs = average(members, data), data.train.inputs
    goals = [statistics(member, inputs) for member in members]
    hidden = inputs
    for index, layer in enumerate(network.hidden):
        norm = nn.BatchNorm1d(layer.out_features, eps=1e-12, track_running_stats=False)
        norm.bias.data, norm.weight.data = (torch.stack([goal[index][k] for goal in goals]).mean(0) for k in (0, 1))
        hidden = torch.relu(norm(layer(hidden)))
    expected = network.head(hidden)
    repair_layers(network, list(members), data, ["hidden.0", "hidden.1", "hidden.2"])
    torch.testing.assert_close(network(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 0, 2), (5, 5, 5)])
def test_members_are_weighted(weights):
    members, data = deep(3)
    network, inputs = average(members, data), data.train.inputs
    repair_layers(network, list(members), data, ["hidden.0", "hidden.1", "hidden.2"], weights=weights)
    goals = [statistics(member, inputs) for member in members]
    for layer, found in enumerate(statistics(network, inputs)):
        for which in (0, 1):
            expected = sum(w * goal[layer][which] for w, goal in zip(weights, goals, strict=True)) / sum(weights)
            torch.testing.assert_close(found[which], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["repair", "rescale"])
def test_a_member_with_all_the_weight_is_unchanged(kind):
    members, data = deep(2)
    network = members.member(1)
    repaired = repair(network, members, data, kind=kind, weights=(0.0, 1.0))
    torch.testing.assert_close(dict(repaired.state_dict()), dict(network.state_dict()), rtol=1e-4, atol=1e-5)
    equal = repair(network, members, data, kind=kind)
    assert not torch.allclose(equal.hidden[0].weight, network.hidden[0].weight, rtol=0.01)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (0.0, 0.0), (1.0, math.nan), (1.0, math.inf)])
def test_invalid_weights(weights):
    members, data = deep(2)
    with pytest.raises(EnfoldError, match="weights"):
        repair(members.member(0), members, data, weights=weights)


def in_batches(data: Data, size: int) -> Data:
    inputs, labels = data.train.inputs.split(size), data.train.labels.split(size)
    return data.replace(train=list(zip(inputs, labels, strict=True)))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_small_batches_are_combined(size):
    members, data = deep(2)
    network = average(members, data)
    whole, pooled = (repair(network, members, each) for each in (data, in_batches(data, size)))
    torch.testing.assert_close(dict(pooled.state_dict()), dict(whole.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["repair", "rescale"])
def test_a_member_is_unchanged_for_any_batch(kind, monkeypatch):
    monkeypatch.setattr(spreads, "BATCH", 3)
    members, data = deep(1)
    network = members.member(0)
    repaired = repair(network, DeepEnsemble([network] * 2), data, kind=kind)
    torch.testing.assert_close(dict(repaired.state_dict()), dict(network.state_dict()), rtol=1e-5, atol=1e-6)


def test_one_example_is_too_few_to_repair():
    members, data = deep(2)
    ones = data.replace(train=[(data.train.inputs[:1], data.train.labels[:1])])
    with pytest.raises(EnfoldError, match="2 train examples or more"):
        repair(average(members, data), members, ones)


def ordered(data: Data, size: int) -> Data:
    """Batches of identical examples."""
    order = data.train.inputs.flatten(1)[:, 0].argsort()
    inputs, labels = data.train.inputs[order].split(size), data.train.labels[order].split(size)
    return data.replace(train=list(zip(inputs, labels, strict=True)))


@pytest.mark.parametrize("kind", ["repair", "rescale"])
@pytest.mark.parametrize("sorted_by_value", [False, True])
def test_goals_are_reached_over_all_batches_in_every_layer(kind, sorted_by_value):
    members = DeepEnsemble([drawn(lambda: MLP(4, [12, 10, 9, 11, 10, 8], 3), seed) for seed in range(3)])
    data = pixels((4,), 3000)
    inputs, given = data.train.inputs, ordered(data, 300) if sorted_by_value else data
    matched = align(members, data)
    network, plain = (average(matched, data) for _ in range(2))
    repair_layers(network, list(matched), given, [f"hidden.{k}" for k in range(6)], kind)
    goals = [statistics(member, inputs) for member in matched]
    for layer, (mean, spread) in enumerate(statistics(network, inputs)):
        wanted = [torch.stack([goal[layer][which] for goal in goals]).mean(0) for which in (0, 1)]
        torch.testing.assert_close(spread, wanted[1], rtol=1e-5, atol=1e-6)
        if kind == "repair":
            torch.testing.assert_close(mean, wanted[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(statistics(plain, inputs)[5][1], wanted[1], rtol=0.2)


def test_goals_are_reached_behind_batch_norm_over_all_batches():
    """The layer is measured behind the statistics that the network will have."""
    layers = nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)
    members, data = DeepEnsemble([drawn(lambda: nn.Sequential(*layers), seed) for seed in range(2)]), pixels((4,), 1000)
    matched = align(members, data)
    network = weight_matching(members, ordered(data, 100), repair="repair")
    found = network[:4](data.train.inputs).detach()
    goals = torch.stack([member[:4](data.train.inputs).detach() for member in matched])
    torch.testing.assert_close(found.mean(0), goals.mean((0, 1)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.std(0), goals.std(1).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["repair", "closed_form"])
def test_a_random_loader_repeats_its_batches(kind):
    members, data = deep(1)
    network, part = members.member(0), TensorDataset(data.train.inputs, data.train.labels)
    drawing = data.replace(train=DataLoader(part, 20, shuffle=True, drop_last=True, collate_fn=noisy))
    noise = torch.random.get_rng_state()
    repaired = repair(network, DeepEnsemble([network] * 2), drawing, kind=kind)
    torch.testing.assert_close(dict(repaired.state_dict()), dict(network.state_dict()), rtol=1e-5, atol=1e-6)
    repair_layers(network, [network], drawing, ["hidden.0"], kind)
    assert torch.equal(noise, torch.random.get_rng_state())


def noisy(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch with augmentations."""
    inputs, labels = (torch.stack(each) for each in zip(*examples, strict=True))
    return inputs + torch.randn(inputs.shape), labels


@pytest.mark.parametrize("weights", [None, (0.6, 0.1, 0.1, 0.2)])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 9), lambda: nn.Conv2d(3, 5, 3)], ids=["linear", "convolution"])
def test_the_closed_form_is_exact_for_the_first_layer(make, weights):
    layer = make()
    data = pixels((4,) if isinstance(layer, nn.Linear) else (3, 8, 8), 300)
    width = layer(data.train.inputs[:1]).numel()
    members = DeepEnsemble(
        [drawn(lambda: nn.Sequential(make(), nn.Flatten(), nn.ReLU(), nn.Linear(width, 3)), k) for k in range(4)]
    )
    mean = [1 / 4] * 4 if weights is None else weights
    one, other, plain = (members.network(mean_of(states_of(members), mean)) for _ in range(3))
    for network, kind in ((one, "repair"), (other, "closed_form")):
        repair_layers(network, list(members), data, ["0"], kind, weights=weights)
    torch.testing.assert_close(dict(other.state_dict()), dict(one.state_dict()), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(other[0].weight, plain[0].weight, rtol=0.05)


def test_the_closed_form_follows_from_deviations_and_correlations():
    """σ² = Σ_mn α_m α_n ρ_mn σ_m σ_n in every layer, and the merged network is not run."""
    members, data = deep(3)
    network, alpha = average(members, data), torch.tensor([0.5, 0.3, 0.2])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.register_forward_pre_hook(refuse)
    repair_layers(
        network, list(members), data, ["hidden.0", "hidden.1", "hidden.2"], "closed_form", weights=alpha.tolist()
    )
    units = zip(*(before_activation(member, data.train.inputs) for member in members), strict=True)
    for layer, each in enumerate(torch.stack(one) for one in units):  # (M, N, d)
        spreads, means = each.std(1, correction=0), alpha @ each.mean(1)
        correlations = torch.stack([torch.corrcoef(unit) for unit in each.movedim(2, 0)])  # (d, M, M)
        weighted = alpha * spreads.mT  # (d, M)
        scale = (alpha @ spreads) / torch.einsum("dm,dmn,dn->d", weighted, correlations, weighted).sqrt()
        found = network.hidden[layer]
        weight, bias = before[f"hidden.{layer}.weight"], before[f"hidden.{layer}.bias"]
        torch.testing.assert_close(found.weight, scale[:, None] * weight, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.bias, scale * (bias - means) + means, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["repair", "closed_form"])
def test_units_are_measured_before_in_place_operations(kind):
    def make(inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 9), nn.ReLU(inplace), nn.Linear(9, 8), nn.ReLU(inplace), nn.Linear(8, 3))

    data, found = pixels((4,)), []
    for inplace in (False, True):
        members = DeepEnsemble([drawn(lambda inplace=inplace: make(inplace), seed) for seed in range(3)])
        found.append(weight_matching(members, data, repair=kind))
    torch.testing.assert_close(dict(found[1].state_dict()), dict(found[0].state_dict()))


def refuse(*_: object) -> None:
    """Nothing may be run."""
    raise AssertionError("the merged network was run")


def test_the_closed_form_as_an_option_and_as_a_step():
    members, data = deep(3)
    option = weight_matching(members, data, repair="closed_form")
    step = repair(weight_matching(members, data, repair="none"), members, data, kind="closed_form")
    assert all(torch.equal(step.state_dict()[name], tensor) for name, tensor in option.state_dict().items())
    others = (weight_matching(members, data, repair=kind) for kind in ("none", "repair"))
    found, plain, goal = (statistics(network, data.train.inputs)[0][1] for network in (option, *others))
    torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, goal, rtol=0.05)
