"""Activations: moments against those of the activations themselves, and which layers show which units."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import (
    activation_matching,
    align,
    c2m3,
    cca_merge,
    merge_many,
    ot_fusion,
    perm_avg,
    straight_through,
    weight_matching,
    zipit,
)
from enfold.merge.common.activations import find_places, measure_moments
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.split import match_unobserved
from enfold.merge.common.states import states_of
from enfold.networks import ViT
from enfold.symmetry import Symmetry, symmetries
from enfold.train import TrainConfig
from planted import NETWORKS, Routed, assert_back, convolutional, drawn, pixels, planted, shuffled


def network_and_symmetry(make, shape) -> tuple[nn.Module, Symmetry]:
    network = drawn(make)
    return network, symmetries(network, torch.randn(2, *shape))


def transformer() -> nn.Module:
    return ViT((3, 8, 8), 3, width=8, depth=1, heads=2, expansion=2)


@pytest.mark.parametrize("first", ["inputs", "outputs"])
def test_moments_are_those_of_the_units(first):
    make, shape = NETWORKS["shallow"]
    networks, data = [drawn(make, seed) for seed in range(3)], pixels(shape, count=300)
    symmetry = symmetries(networks[0], data.train.inputs[:2])
    found = measure_moments(networks, find_places(networks[0], symmetry, first), data)["hidden.0"]
    units = torch.cat([network.hidden[0](data.train.inputs) for network in networks], dim=1).detach().double()
    units = units.relu() if first == "inputs" else units
    torch.testing.assert_close(found.second(), units.T @ units / 300, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.covariance(), torch.cov(units.T, correction=0), rtol=1e-4, atol=1e-5)
    moving = units.std(0) > 0
    both = moving[:, None] & moving
    expected = torch.corrcoef(units.T)
    torch.testing.assert_close(found.correlation()[both], expected[both], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.block(found.second(), 1, 2), (units.T @ units / 300)[12:24, 24:])


@pytest.mark.parametrize("first", ["inputs", "outputs"])
def test_units_are_recorded_before_in_place_operations(first):
    def make(inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace), nn.Linear(5, 6), nn.ReLU(inplace), nn.Linear(6, 3))

    plain, data = drawn(lambda: make(False)), pixels((4,))
    other = make(True)
    other.load_state_dict(plain.state_dict())
    places = find_places(plain, symmetries(plain, data.train.inputs[:2]), first)
    expected, found = (measure_moments([network], places, data) for network in (plain, other))
    assert expected.keys() == found.keys() == {"0", "2"}
    for name, one in expected.items():
        torch.testing.assert_close(found[name].sums, one.sums)


def test_places_of_a_map_and_a_flatten_are_samples():
    network, symmetry = network_and_symmetry(convolutional, (3, 8, 8))
    data = pixels(count=50)
    found = measure_moments([network], find_places(network, symmetry), data)
    last = network[:6](data.train.inputs).detach().double()  # (50, 5, 2, 2), in front of the flatten
    assert found["4"].counts == [50 * 4]
    torch.testing.assert_close(found["4"].sums[0], last.sum((0, 2, 3)), rtol=1e-4, atol=1e-3)


def test_the_number_of_examples_is_limited():
    make, shape = NETWORKS["shallow"]
    network, data = drawn(make), pixels(shape, count=300)
    symmetry = symmetries(network, data.train.inputs[:2])
    assert measure_moments([network], find_places(network, symmetry), data, examples=200)["hidden.0"].counts == [200.0]
    with pytest.raises(EnfoldError, match="examples"):
        measure_moments([network], find_places(network, symmetry), data, examples=0)


@pytest.mark.parametrize("size", [1, 16, 250])
def test_examples_are_counted_for_any_batch_size(size):
    make, shape = NETWORKS["shallow"]
    network, data = drawn(make), pixels(shape, count=300)
    symmetry, part = symmetries(network, data.train.inputs[:2]), data.train
    loader = [(part.inputs[k : k + size], part.labels[k : k + size]) for k in range(0, 300, size)]
    found = measure_moments([network], find_places(network, symmetry), data.replace(train=loader), examples=200)
    assert found["hidden.0"].counts == [200.0]


@pytest.mark.parametrize(
    "fold", [partial(ot_fusion, cost="activations"), partial(activation_matching, watch="outputs")]
)
def test_channels_of_a_layer_norm_over_positions(fold):
    members, network, data = planted("normed", 3)
    assert_back(fold(members, data), network, data)


def test_constant_units_are_similar_to_equal_constants_only():
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        network[0].bias[:2] = -100.0
        network[0].bias[2] = 3.0
    symmetry = symmetries(network, torch.randn(2, 4))
    likes = measure_moments([network], find_places(network, symmetry), pixels((4,)))["0"].correlation()
    assert torch.equal(likes[:2, :2], torch.ones(2, 2).double())
    assert torch.equal(likes[:2, 2:], torch.zeros(2, 3).double())


def test_different_constant_units_are_not_similar():
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        network[0].weight[:4] = 0.0
        network[0].bias[:4] = torch.tensor([2.0, 3.0, 2.0 + 1e-6, -1.0])
    symmetry = symmetries(network, torch.randn(2, 4))
    likes = measure_moments([network], find_places(network, symmetry), pixels((4,)))["0"].correlation()
    expected = torch.eye(4)
    expected[0, 2] = expected[2, 0] = 1
    assert torch.equal(likes[:4, :4], expected.double())


@pytest.mark.parametrize("fold", [partial(activation_matching), partial(zipit)])
def test_constant_units_are_matched(fold):
    """Constant units of permuted copies are distinguished by their values."""
    network, data = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), pixels((4,))
    with torch.no_grad():
        network[0].weight[:4] = 0.0
        network[0].bias[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    symmetry = symmetries(network, data.train.inputs[:2])
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    members = DeepEnsemble([network, *(DeepEnsemble([network]).network(shuffled(state, symmetry, k)) for k in (1, 2))])
    assert_back(fold(members, data), network, data)


def test_a_residual_stream_is_observed_at_all_its_layers():
    make, shape = NETWORKS["residual"]
    network, symmetry = network_and_symmetry(make, shape)
    inputs = find_places(network, symmetry, "inputs")
    assert inputs.keys() == {group.name for group in symmetry.groups}
    assert any(len(places) > 1 for places in inputs.values())
    with pytest.raises(EnfoldError, match="watch"):
        find_places(network, symmetry, "weights")


def test_heads_are_matched_by_weights_and_units_by_activations():
    network, symmetry = network_and_symmetry(transformer, (3, 8, 8))
    members, data = DeepEnsemble([network, drawn(transformer, 1)]), pixels((3, 8, 8))
    states, places = match_unobserved(
        Alignment(members, states_of(members), symmetry, data), 0, "inputs", 0, examples=30
    )
    blocks = {group.name for group in symmetry.groups} - places.keys()
    assert blocks
    assert places
    moved = members.network(states[1])
    inputs = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(moved(inputs), members.member(1)(inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "fold",
    [
        *(partial(weight_matching), partial(activation_matching), partial(merge_many), partial(c2m3)),
        *(partial(zipit), partial(cca_merge), partial(ot_fusion), partial(ot_fusion, cost="weights")),
    ],
    ids=lambda fold: f"{fold.func.__name__} {fold.keywords}",
)
def test_copies_with_permuted_heads_average_to_the_original(fold):
    members, network, data = planted("attending", 3)
    assert_back(fold(members, data), network, data)


@pytest.mark.parametrize(
    "fold",
    [
        *(
            partial(weight_matching),
            partial(merge_many),
            partial(c2m3),
            partial(straight_through),
            partial(perm_avg, matched=40.0, config=TrainConfig(epochs=0)),
        ),
        *(
            partial(activation_matching),
            partial(zipit),
            partial(cca_merge),
            partial(ot_fusion, watch="inputs"),
            partial(ot_fusion, cost="weights"),
        ),
        *(partial(activation_matching, watch="outputs"), partial(zipit, watch="outputs"), partial(ot_fusion)),
    ],
    ids=lambda fold: f"{fold.func.__name__} {fold.keywords}",
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_units_with_permuted_samples_average_to_the_original(fold, seed):
    """What mixes the tokens of a mixer sees one sample a channel."""
    members, network, data = planted("mixing", 2 if fold.func is straight_through else 3, seed)
    assert_back(fold(members, data), network, data)


def test_units_with_order_dependent_samples_are_matched_by_weights():
    members, network, data = planted("mixing", 2)
    symmetry = symmetries(network, data.train.inputs[:2])
    _, seen = match_unobserved(Alignment(members, states_of(members), symmetry, data), 0, "inputs", 0, examples=30)
    assert {group.name for group in symmetry.groups} == {"embed", "tokens.0", "channels.0"}
    assert seen.keys() == {"embed", "channels.0"}


def test_a_random_loader_shows_all_groups():
    members, network, data = planted("deep", 2)
    source, part = torch.Generator().manual_seed(0), TensorDataset(data.train.inputs, data.train.labels)
    drawing = data.replace(train=DataLoader(part, 20, shuffle=True, generator=source))
    symmetry = symmetries(network, data.train.inputs[:2])
    _, seen = match_unobserved(Alignment(members, states_of(members), symmetry, drawing), 0, "inputs", 0, examples=30)
    assert seen.keys() == {group.name for group in symmetry.groups}


class Elsewhere(Routed):
    """The same, with a module that chooses and calls experts of another one."""

    class Chooses(nn.Module):
        """Calls what it is given."""

        def forward(self, chosen: Tensor, tokens: Tensor, experts: nn.ModuleList) -> Tensor:
            """What the experts make of the tokens that are theirs."""
            made = torch.zeros_like(tokens)
            for index, expert in enumerate(experts):
                made[chosen == index] = expert(tokens[chosen == index])
            return made

    def __init__(self) -> None:
        super().__init__()
        self.chooses = self.Chooses()
        self.before = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, tokens, features) -> (B, classes)."""
        tokens = self.embed(self.before(inputs))
        made = self.chooses(self.gate(tokens).argmax(-1), tokens, self.experts)
        return self.head((tokens + made).mean(1))


ACTIVATIONS = [partial(activation_matching), partial(zipit), partial(cca_merge), partial(ot_fusion)]


@pytest.mark.combinations
@pytest.mark.filterwarnings("ignore::enfold.merge.common.states.UnalignedWarning")
@pytest.mark.parametrize("fold", [*ACTIVATIONS, partial(ot_fusion, cost="weights")])
@pytest.mark.parametrize("make", [Routed, Elsewhere])
def test_units_of_selected_samples_are_matched_by_weights(fold, make, monkeypatch):
    monkeypatch.setitem(NETWORKS, "routed", (make, (4, 5)))
    members, network, data = planted("routed", 3)
    assert_back(fold(members, data), network, data)
    apart = DeepEnsemble([drawn(make, seed) for seed in range(3)])  # each routes in its own way
    assert torch.isfinite(fold(apart, data)(data.test.inputs)).all()


def test_modules_with_control_flow_or_other_samples_are_not_observed():
    copies, _, data = planted("routed", 2)  # of which the same tokens go to each expert
    one, other = (DeepEnsemble([drawn(make, seed) for seed in range(3)]) for make in (Routed, Elsewhere))
    for members, expected in ((copies, set()), (one, set()), (other, {"before.0", "before.2"})):
        symmetry = symmetries(members.member(0), data.train.inputs[:8])  # some for each expert
        assert {"experts.0.0", "experts.1.0"} <= {group.name for group in symmetry.groups}
        _, seen = match_unobserved(Alignment(members, states_of(members), symmetry, data), 0, "inputs", 0, examples=60)
        assert seen.keys() == expected


@pytest.mark.parametrize("method", ["activation_matching", "weight_matching"])
def test_attention_computes_the_same_function(method):
    members, data = DeepEnsemble([drawn(transformer, seed) for seed in range(3)]), pixels(count=30)
    matched = align(members, data, method=method)
    inputs = data.test.inputs
    torch.testing.assert_close(matched(inputs), members(inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "fold",
    [
        partial(cca_merge),
        partial(zipit),
        partial(ot_fusion),
        partial(ot_fusion, cost="weights"),
        partial(weight_matching, repair="repair"),
    ],
)
def test_attention_can_be_merged_and_equal_members_are_unchanged(fold):
    network, data = drawn(transformer), pixels(count=30)
    folded = fold(DeepEnsemble([network] * 3), data)
    torch.testing.assert_close(dict(folded.named_parameters()), dict(network.named_parameters()), rtol=1e-3, atol=1e-4)
    other = fold(DeepEnsemble([network, drawn(transformer, 1)]), data)
    assert torch.isfinite(other(data.test.inputs)).all()


class Uncalled(nn.Module):
    """Layers whose weights are used, but which are not called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 9), nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(F.linear(inputs, self.one.weight, self.one.bias))
        return self.three(torch.relu(F.linear(hidden, self.two.weight, self.two.bias)))


@pytest.mark.parametrize(
    "fold",
    [
        partial(activation_matching),
        partial(zipit),
        partial(cca_merge),
        partial(ot_fusion),
        partial(ot_fusion, watch="inputs"),
        partial(ot_fusion, cost="weights"),
    ],
    ids=lambda fold: f"{fold.func.__name__} {fold.keywords}",
)
def test_units_of_layers_that_are_not_called_are_matched_by_weights(fold, monkeypatch):
    monkeypatch.setitem(NETWORKS, "uncalled", (Uncalled, (4,)))
    members, network, data = planted("uncalled", 3)
    assert_back(fold(members, data), network, data)


@pytest.mark.parametrize("fold", [partial(activation_matching), partial(zipit), partial(cca_merge), partial(ot_fusion)])
def test_a_member_whose_units_are_not_finite_is_named(fold):
    members, _, data = planted("shallow", 3)
    with torch.no_grad():
        next(tensor for name, tensor in members.named_parameters() if "hidden" in name)[2] = 1e38  # finite itself
    with pytest.raises(EnfoldError, match=r"those of 'hidden.0' in member 2 are not"):
        fold(members, data)


class ChannelNorm(nn.LayerNorm):
    """A layer norm of channels that lie behind the batch, as ConvNeXt has."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps).movedim(
            -1, 1
        )


class ChannelLinear(nn.Linear):
    """A linear layer of such channels."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.movedim(1, -1)).movedim(-1, 1)


def channels_first(channels: int, side: int) -> nn.Module:
    """Residual, with norms and layers whose channels are not where those of the PyTorch classes are."""
    stem, body = nn.Conv2d(3, channels, 3, padding=1), nn.Sequential(ChannelNorm(channels), nn.ReLU())
    mixing = nn.Sequential(ChannelLinear(channels, channels), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *body, *mixing, nn.Linear(channels, 3))


@pytest.mark.combinations
@pytest.mark.parametrize("side", [4, 6, 9])  # fewer places than channels, as many, more
@pytest.mark.parametrize(
    "fold",
    [
        partial(ot_fusion),
        partial(ot_fusion, watch="inputs"),
        partial(activation_matching, watch="outputs"),
        partial(cca_merge, watch="outputs"),
        partial(zipit, watch="outputs"),
        partial(weight_matching, repair="repair"),
    ],
    ids=lambda fold: f"{fold.func.__name__} {fold.keywords}",
)
def test_channels_are_found_by_what_a_layer_does_and_not_by_its_class(fold, side, monkeypatch):
    monkeypatch.setitem(NETWORKS, "channels first", (lambda: channels_first(6, side), (3, side, side)))
    members, network, data = planted("channels first", 2)
    assert_back(fold(members, data), network, data)
