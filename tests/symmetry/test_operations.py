"""Symmetries through single operations of torch: which units they leave free, and which they fix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from known_networks import Calls
from known_operations import NETWORKS, bilinear, distances, made_of, tokens, units
from torch import Tensor, nn
from torch.func import functional_call

from enfold.symmetry import Symmetry, permute, symmetries


def found_in(network: nn.Module, inputs: Tensor) -> Symmetry:
    """The symmetries, verified with random orders of all groups in float64."""
    network = network.eval()
    symmetry = symmetries(network, inputs)
    network = copy.deepcopy(network).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = network(inputs)
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        orders = {group.name: torch.randperm(group.size, generator=source) for group in symmetry.groups}
        orders = {name: order.roll(1) if order.equal(order.sort()[0]) else order for name, order in orders.items()}
        changed = permute(state, symmetry, orders)
        result = functional_call(network, changed, inputs)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-9 * float(expected.detach().abs().max()))
    return symmetry


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", NETWORKS)
def test_units_are_traced_through_operations(name):
    torch.manual_seed(0)
    make, sizes = NETWORKS[name]
    symmetry = found_in(*make())
    assert sorted(group.size for group in symmetry.groups) == sizes
    assert not symmetry.note


def axes_of(network: nn.Module, inputs: Tensor, group: str) -> list[str]:
    found = symmetries(network.eval(), inputs)[group].axes
    return [f"{axis}{' in' if axis.role == 'consumes' else ''}" for axis in found]


def test_a_bilinear_layer_consumes_both_inputs():
    network, inputs = bilinear()
    assert axes_of(network, inputs, "one") == ["one.weight[0]", "one.bias[0]", "both.weight[1] in"]
    assert axes_of(network, inputs, "two") == ["two.weight[0]", "two.bias[0]", "both.weight[2] in"]
    assert axes_of(network, inputs, "both") == ["both.weight[0]", "both.bias[0]", "head.weight[1] in"]


def test_centres_consume_features():
    network, inputs = distances()
    assert axes_of(network, inputs, "first") == ["centres[1] in", "first.weight[0]", "first.bias[0]"]
    assert axes_of(network, inputs, "centres") == ["centres[0]", "head.weight[1] in"]


@pytest.mark.parametrize(
    ("name", "inner"),
    [("unfold", (1, 6 * 6)), ("fold", (4, 16)), ("pixel shuffle", (4, 4)), ("pixel unshuffle", (1, 16))],
)
def test_channels_are_blocks_of_kernel_positions(name, inner):
    (group,) = symmetries(*NETWORKS[name][0]()).groups
    axes = {axis.name: axis for axis in group.axes}
    assert (axes["first.weight"].inner, axes["head.weight"].inner) == inner


def test_experts_are_permuted_with_their_gates():
    network, inputs = NETWORKS["two of three experts"][0]()
    (group,) = (group for group in symmetries(network, inputs).groups if group.size == 3)
    assert {f"{axis.name}[{axis.axis}]" for axis in group.axes} == {"gate.weight[0]", "gate.bias[0]", "experts[0]"}


def gates_by_number(net: Calls, x: Tensor) -> Tensor:
    gates, found = net.first(x).topk(2, 1)
    return net.head(gates * (found.unsqueeze(-1) == 1).sum(-1))


def moved(net: Calls, x: Tensor) -> Tensor:
    return net.head(net.first(x).gather(1, torch.tensor([[1, 0], [2, 3]])))


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (units(lambda x: x.cummax(1)[0]), "of aten.cummax"),
        (units(lambda x: torch.fft.fft(x).abs()), "of aten._fft_r2c"),
        (units(lambda x: x.unfold(1, 2, 2).sum(-1)), "of aten.unfold"),
        (units(lambda x: x[:, 1:4:2]), "of aten.slice"),
        (tokens(lambda x: x @ (x.mT @ x).tril()), "of aten.tril"),
        (units(lambda x: F.rrelu(x, training=True)), "of aten.rrelu_with_noise"),
        (units(lambda x: x @ torch.diag_embed(x, 1)[0, :6]), "of aten.diag_embed"),
        (made_of(moved, torch.randn(2, 4), first=nn.Linear(4, 6), head=nn.Linear(2, 3)), "of aten.gather"),
        (made_of(gates_by_number, torch.randn(2, 4), first=nn.Linear(4, 6), head=nn.Linear(2, 3)), "of aten.eq"),
    ],
    ids=["cummax", "fft", "windows", "slice", "triangle", "noise", "other diagonal", "numbers", "number of a gate"],
)
def test_ordered_axes_are_fixed_with_a_reason(network, reason):
    symmetry = symmetries(*network)
    assert not symmetry.groups
    assert {fixed.reason for fixed in symmetry.fixed if fixed.name == "first.bias"} == {
        f"{reason} in the network itself"
    }


class Odd(nn.Module):
    """Operations with arguments that their rules do not expect: what they touch is fixed, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        classes = F.one_hot(input=hidden.argmax(-1), num_classes=5).to(hidden)
        return self.second(hidden * classes) + torch.cumsum(hidden.sum(), 0)


def test_a_failing_rule_fixes_its_arguments_only():
    assert [group.size for group in symmetries(Odd(), torch.randn(2, 4))] == [5]
