"""Symmetries: groups of a network, invariance of its function, and fixed axes with reasons."""

import copy

import pytest
import torch
from known_networks import KNOWN, Calls, made, symmetry_of
from torch import Tensor, nn
from torch.func import functional_call

from enfold.errors import EnfoldError
from enfold.networks import ResNet
from enfold.symmetry import Symmetry, permute, symmetries


def doubled(network: nn.Module, inputs: Tensor) -> tuple[nn.Module, Tensor]:
    return copy.deepcopy(network).double(), inputs.double() if inputs.is_floating_point() else inputs


def random_orders(symmetry: Symmetry, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    orders = {group.name: torch.randperm(group.size, generator=source) for group in symmetry.groups}
    return {name: order.roll(1) if order.equal(order.sort().values) else order for name, order in orders.items()}


@pytest.mark.parametrize("name", KNOWN)
def test_permuting_all_groups_preserves_the_function(name):
    network, inputs = made(name)
    symmetry = symmetry_of(name)
    assert sorted(group.size for group in symmetry.groups) == KNOWN[name][2]
    assert not symmetry.note
    network, inputs = doubled(network, inputs)
    state = network.state_dict()
    changed = permute(state, symmetry, random_orders(symmetry))
    expected = network(inputs)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(functional_call(network, changed, inputs), expected, rtol=0, atol=1e-9 * scale)
    assert all(not torch.equal(changed[group.axes[0].name], state[group.axes[0].name]) for group in symmetry.groups)


@pytest.mark.parametrize("name", KNOWN)
def test_every_axis_of_every_tensor_is_in_a_group_or_fixed_for_a_reason(name):
    network, _ = made(name)
    symmetry = symmetry_of(name)
    listed = {(axis.name, axis.axis) for group in symmetry.groups for axis in group.axes}
    listed |= {(fixed.name, fixed.axis) for fixed in symmetry.fixed}
    for key, tensor in network.state_dict().items():
        assert all((key, axis) in listed for axis in range(tensor.ndim) if tensor.shape[axis] > 1)
    assert all(fixed.reason and fixed.reason in str(symmetry) for fixed in symmetry.fixed)
    assert len({group.name for group in symmetry.groups}) == len(symmetry.groups)


def test_inputs_and_classes_are_in_no_group():
    fixed = {(fixed.name, fixed.axis): fixed.reason for fixed in symmetry_of("mlp").fixed}
    assert fixed == {
        ("hidden.0.weight", 1): "they are the network's inputs",
        ("head.weight", 0): "they are the network's outputs",
        ("head.bias", 0): "they are the network's outputs",
    }


def test_residual_stream_and_blocks_have_groups():
    symmetry = symmetry_of("resnet")
    stream = symmetry["conv"]
    roles = {axis.name: axis.role for axis in stream.axes}
    assert roles["groups.0.1.conv1.weight"] == roles["groups.1.0.shortcut.1.weight"] == "consumes"
    assert roles["groups.0.1.conv2.weight"] == roles["groups.0.1.norm2.running_var"] == "produces"
    assert {axis.name for axis in symmetry["groups.0.1.conv1"].axes} == {
        *(f"groups.0.1.{name}" for name in ("conv1.weight", "conv2.weight", "norm1.weight", "norm1.bias")),
        *(f"groups.0.1.norm1.{name}" for name in ("running_mean", "running_var")),
    }


def test_blocks_and_segments():
    axes = {axis.name: axis for axis in symmetry_of("cnn")["6"].axes}
    assert (axes["10.weight"].axis, axes["10.weight"].inner, axes["10.weight"].role) == (1, 4, "consumes")
    axes = {(axis.name, axis.offset): axis for axis in symmetry_of("dense")["two"].axes}
    assert axes["norm.weight", 3].size == 4
    assert axes["head.weight", 27].inner == 9


def test_heads_and_their_units_have_groups():
    symmetry = symmetry_of("packed attention")
    heads = symmetry["qkv in blocks of 4"]
    assert [(axis.name, axis.offset) for axis in heads.axes] == [
        ("qkv.weight", 0), ("qkv.weight", 8), ("qkv.weight", 16), ("out.weight", 0),
    ]  # fmt: skip
    second = symmetry["qkv from 4"]  # queries and keys of head 1
    assert [(axis.name, axis.offset) for axis in second.axes] == [("qkv.weight", 4), ("qkv.weight", 12)]
    value = symmetry["qkv from 20"]
    assert [(axis.name, axis.offset, axis.role) for axis in value.axes] == [
        ("qkv.weight", 20, "produces"), ("out.weight", 4, "consumes"),
    ]  # fmt: skip


def test_a_tied_tensor_has_both_roles_and_all_its_names():
    network, inputs = made("tied readout")
    assert [axis.role for axis in symmetry_of("tied readout").groups[0].axes] == ["both"]
    first, second = nn.Linear(4, 5), nn.Linear(4, 5)
    second.weight = first.weight
    network = Calls(lambda net, x: net.head(net.one(x) * net.two(x)), one=first, two=second, head=nn.Linear(5, 3))
    symmetry = symmetries(network, torch.zeros(2, 4))
    names = {axis.name: axis.tied_to for axis in symmetry.groups[0].axes}
    assert names["two.weight"] == "one.weight"
    inputs, state = torch.randn(3, 4), network.state_dict()
    changed = permute(state, symmetry, random_orders(symmetry))
    assert torch.equal(changed["two.weight"], changed["one.weight"])
    expected = network(inputs)
    network.load_state_dict(changed)
    torch.testing.assert_close(network(inputs), expected)


def flipped(net: Calls, x: Tensor) -> Tensor:
    x = net.first(x)
    return net.head(torch.relu(x + x.flip(1)))


def scaled(net: Calls, x: Tensor) -> Tensor:
    return net.head(torch.relu(net.first(x) * net.scale))


def counted(net: Calls, x: Tensor) -> Tensor:
    return net.head(torch.relu(net.first(x) + torch.arange(6)))


def chosen(net: Calls, x: Tensor) -> Tensor:
    x = net.first(x)
    return net.head(x + x.gather(1, x.argmax(1, keepdim=True)) * x.argmax(1, keepdim=True))


def summed_up(net: Calls, x: Tensor) -> Tensor:
    return net.head(net.first(x).cumsum(1))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (flipped, "of aten.flip in the network itself"),
        (scaled, "the buffer is a constant"),
        (counted, "of aten.arange in the network itself"),
        (chosen, "of aten.mul in the network itself"),
        (summed_up, "of aten.cumsum in the network itself"),
    ],
)
def test_apparent_symmetries_are_fixed_with_a_reason(function, reason):
    network = Calls(function, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
    network.register_buffer("scale", torch.rand(6))
    symmetry = symmetries(network, torch.zeros(2, 4))
    assert not symmetry.groups
    assert {fixed.reason for fixed in symmetry.fixed if fixed.name == "first.bias"} == {reason}


def test_verification_rejects_wrong_groups(monkeypatch):
    from enfold.symmetry import tracer
    from enfold.symmetry.rules import elementwise

    monkeypatch.setitem(tracer.RULES, "flip", elementwise.pointwise)
    monkeypatch.setitem(tracer.RULES, "cumsum", elementwise.pointwise)
    for function in (flipped, summed_up):
        network = Calls(function, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
        body = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), network)
        symmetry = symmetries(body, torch.zeros(2, 2))
        assert [group.name for group in symmetry.groups] == ["0"]  # what is right stays
        reasons = {fixed.reason for fixed in symmetry.fixed if fixed.name == "2.first.bias"}
        assert reasons == {"a random order along it changes the outputs"}


def test_zero_weights_do_not_hide_a_broken_symmetry(monkeypatch):
    from enfold.symmetry import tracer
    from enfold.symmetry.rules import elementwise

    monkeypatch.setitem(tracer.RULES, "flip", elementwise.pointwise)
    network = Calls(flipped, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    assert not symmetries(network, torch.zeros(2, 4)).groups


@pytest.mark.parametrize(
    ("body", "width", "sizes"),
    [
        (nn.RNN(3, 4, 2), 4, [4, 4]),
        (nn.GRU(3, 4, 2), 4, [4, 4]),
        (nn.LSTM(3, 4, 2, bidirectional=True), 8, [4] * 4),
        (nn.LSTM(3, 4, 2, proj_size=3), 3, [4, 3, 4, 3]),
    ],
    ids=["rnn", "gru", "two directions", "projected"],
)
def test_layers_and_directions_of_a_recurrent_network_are_independent(body, width, sizes):
    """Though all start at one tensor of zeros, and their last states are returned in one."""
    network = Calls(lambda net, x: net.head(net.body(x)[0]), body=body, head=nn.Linear(width, 2))
    assert [group.size for group in symmetries(network.eval(), torch.zeros(5, 2, 3)).groups] == sizes


def test_layers_are_permuted_together_where_their_last_states_are_added():
    network = Calls(lambda net, x: net.head(net.body(x)[1].sum(0)), body=nn.GRU(3, 4, 2), head=nn.Linear(4, 2))
    (group,) = symmetries(network.eval(), torch.zeros(5, 2, 3)).groups
    assert {"body.weight_hh_l0", "body.weight_hh_l1", "head.weight"} <= {axis.name for axis in group.axes}


def test_written_zeros_have_the_labels_of_the_values():
    def forward(net: Calls, x: Tensor) -> Tensor:
        held = x.new_zeros(2, len(x), 4)
        for index, layer in enumerate((net.one, net.two)):
            held[index].copy_(layer(x))
        return net.head(torch.relu(held.sum(0)))

    network = Calls(forward, one=nn.Linear(3, 4), two=nn.Linear(3, 4), head=nn.Linear(4, 2))
    (group,) = symmetries(network, torch.zeros(5, 3)).groups
    assert {"one.weight", "two.weight", "head.weight"} <= {axis.name for axis in group.axes}


def test_unused_axes_are_fixed():
    network = Calls(lambda net, x: net.head(x), unused=nn.Linear(4, 5), head=nn.Linear(4, 3))
    reasons = {fixed.name: fixed.reason for fixed in symmetries(network, torch.zeros(2, 4)).fixed}
    assert reasons["unused.bias"] == "the outputs do not depend on it"


def test_data_dependent_graphs_have_no_groups_and_a_reason():
    def forward(net: Calls, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.head(torch.relu(hidden) if hidden.sum() > 0 else torch.tanh(hidden))

    symmetry = symmetries(Calls(forward, first=nn.Linear(4, 5), head=nn.Linear(5, 3)), torch.zeros(2, 4))
    assert not symmetry.groups
    assert "decides by a value" in symmetry.note
    assert symmetry.note in str(symmetry)
    assert len(symmetry.fixed) == 6


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(2, 5), r"shape \(2, 5\) and type torch.float32 failed .* pass a few inputs"),
        (torch.zeros(0, 4), r"got a tensor of shape \(0, 4\)"),
        ([1.0], "list"),
    ],
)
def test_a_wrong_example_is_refused(example, message):
    with pytest.raises(EnfoldError, match=message):
        symmetries(nn.Linear(4, 3), example)


def test_the_network_and_the_random_state_are_not_changed():
    network = nn.Sequential(ResNet(depth=8, width=4).train(), nn.Dropout(0.5))
    network[0].norm.eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    modes, random = [module.training for module in network.modules()], torch.get_rng_state()
    symmetries(network, torch.zeros(2, 3, 8, 8))
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())


def test_the_same_seed_gives_the_same_groups():
    network, inputs = made("vit")
    assert symmetry_of("vit") == symmetries(network, torch.zeros_like(inputs), seed=1)


def test_a_third_party_network():
    library = pytest.importorskip("rtdl_revisiting_models")
    settings = library.FTTransformer.get_default_kwargs(n_blocks=1)
    body = library.FTTransformer(n_cont_features=3, cat_cardinalities=[], d_out=2, **settings)
    network = Calls(lambda net, x: net.body(x, None), body=body).eval()
    symmetry = symmetries(network, torch.zeros(2, 3))
    hidden = body.backbone.blocks[0].ffn.linear2.in_features
    sizes = [group.size for group in symmetry.groups]
    assert sizes.count(settings["d_block"]) == sizes.count(hidden) == 1  # the stream, and inside the block
    inputs = torch.randn(3, 3)
    changed = permute(network.state_dict(), symmetry, random_orders(symmetry))
    torch.testing.assert_close(functional_call(network, changed, inputs), network(inputs), rtol=1e-4, atol=1e-4)


class Counted(nn.Module):
    """A network that counts its forwards, with layers that it does not call."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU())
        self.head = nn.Linear(5, 3)
        self.unused = nn.Sequential(*(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)) for _ in range(unused)))

    def forward(self, inputs: Tensor) -> Tensor:
        counted.append(self)
        return self.head(self.body(inputs).mean((2, 3)))


counted: list[nn.Module] = []


def test_uncalled_layers_need_no_extra_forward_passes():
    numbers, found = [], []
    for unused in (0, 20):
        counted.clear()
        found.append(symmetries(Counted(unused), torch.zeros(2, 3, 8, 8)))
        numbers.append(len(counted))
    assert numbers[1] <= 2 * numbers[0]
    assert found[0].groups == found[1].groups
    reasons = {one.reason for one in found[1].fixed if one.name.startswith("unused")}
    assert reasons == {"the outputs do not depend on it"}


def test_dependence_without_a_gradient_is_detected():
    """Of two layers, the outputs have a gradient for none, and depend on one."""

    def forward(net: Calls, x: Tensor) -> Tensor:
        return net.head(x) + (torch.sigmoid(net.second(torch.relu(net.first(x)))) > 0.5).float()

    parts = {name: nn.Linear(4, 4) for name in ("first", "second", "head", "unused")}
    found = symmetries(Calls(forward, **parts), torch.zeros(5, 4))
    assert "first" in [group.name for group in found.groups]
    assert "unused.weight" in [one.name for one in found.fixed if one.reason == "the outputs do not depend on it"]
