"""Symmetries of patterns that networks from elsewhere have: masks by head, float32 inside, experts, decisions."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from known_networks import Calls
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.merge import align
from enfold.merge.common.states import UnalignedWarning
from enfold.symmetry import Symmetry, permute, symmetries
from enfold.symmetry.find import CHANGED, SINGLE_ORDER
from enfold.symmetry.tracer import AxisTracer
from enfold.symmetry.verify import Verifier


def found_in(network: nn.Module, inputs: Tensor) -> Symmetry:
    """The symmetries, each group tried by itself on the network in float32."""
    symmetry = symmetries(network.eval(), inputs)
    expected = network(inputs)
    for group in symmetry.groups:
        other = copy.deepcopy(network)
        other.load_state_dict(permute(other.state_dict(), symmetry, {group.name: torch.arange(group.size).roll(1)}))
        torch.testing.assert_close(other(inputs), expected)
    return symmetry


def names_of(symmetry: Symmetry, group: str) -> set[str]:
    return {axis.name for axis in symmetry[group].axes}


def test_a_mask_by_head_is_permuted_with_the_heads():
    def forward(net: Calls, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=net.mask[None])
        return net.out(y.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(3, 8) for name in "qkv"}
    network = Calls(forward, **layers, mask=nn.Parameter(torch.randn(2, 5, 5)), out=nn.Linear(8, 2))
    symmetry = found_in(network, torch.randn(2, 5, 3))
    (heads,) = (group for group in symmetry.groups if "mask" in {axis.name for axis in group.axes})
    assert heads.size == 2
    assert {"q.weight", "k.weight", "v.weight", "out.weight"} <= {axis.name for axis in heads.axes}


def attending(forward: Callable[..., Tensor], keys: int = 2) -> nn.Module:
    layers = {"q": nn.Linear(3, 8), "k": nn.Linear(3, 4 * keys), "v": nn.Linear(3, 4 * keys)}
    return Calls(forward, **layers, out=nn.Linear(8, 2))


def heads_across(net: Calls, x: Tensor) -> Tensor:
    """Units before heads."""
    q, k, v = (layer(x).unflatten(-1, (4, 2)).permute(0, 3, 1, 2) for layer in (net.q, net.k, net.v))
    return net.out(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


def heads_flipped(net: Calls, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    return net.out(F.scaled_dot_product_attention(q, k, v).flip(1).transpose(1, 2).flatten(2))


def test_fixed_heads_with_free_units_are_reported():
    symmetry = found_in(attending(heads_flipped), torch.randn(2, 5, 3))
    assert {group.size for group in symmetry.groups} == {4}
    reasons = {fixed.reason for fixed in symmetry.fixed if (fixed.name, fixed.axis) == ("q.weight", 0)}
    assert reasons == {"of aten.flip in the network itself"}


def test_refused_heads_with_free_units_are_reported(monkeypatch):
    from enfold.symmetry.rules import contraction

    def forward(net: Calls, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        return net.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    monkeypatch.setattr(
        contraction, "_unify_heads", lambda tracer, queries, keys: queries
    )  # as if no two belonged together
    symmetry = found_in(attending(forward), torch.randn(2, 5, 3))
    assert {group.size for group in symmetry.groups} == {2}
    reasons = {fixed.name: fixed.reason for fixed in symmetry.fixed if fixed.name != "out.weight"}
    assert {reasons[name] for name in ("q.bias", "k.bias", "v.bias")} == {CHANGED}


def test_sizes_that_do_not_fit_are_fixed():
    tracer = AxisTracer()
    one, other = tracer.labels.free(4), tracer.labels.free(6)
    tracer.unify(one, other)
    assert tracer.labels.reason(one[0][0]) == tracer.labels.reason(other[0][0]) == tracer.why


def blocks_flipped(net: Calls, x: Tensor) -> Tensor:
    x = net.first(x).unflatten(1, (2, 3))
    return net.head(torch.relu(x + x.flip(1)).flatten(1))


def experts_one_by_one(net: Calls, x: Tensor) -> Tensor:
    hidden = [torch.relu(x @ net.up[index]) @ net.down[index] for index in range(3)]
    return net.head(torch.stack(hidden).sum(0))


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (blocks_flipped, {"first.weight[0]", "first.bias[0]", "head.weight[1]"}),
        (experts_one_by_one, {"up[2]", "down[1]"}),
    ],
)
def test_units_with_one_order_in_all_blocks_are_reported(forward, named):
    parts = {"up": nn.Parameter(torch.randn(3, 4, 5)), "down": nn.Parameter(torch.randn(3, 5, 6))}
    network = Calls(forward, first=nn.Linear(4, 6), head=nn.Linear(6, 2), **parts)
    symmetry = found_in(network, torch.randn(2, 4))
    assert {f"{fixed.name}[{fixed.axis}]" for fixed in symmetry.fixed if fixed.reason == SINGLE_ORDER} == named


def test_heads_across_their_units_are_reported():
    symmetry = found_in(attending(heads_across), torch.randn(2, 5, 3))
    assert sorted(group.size for group in symmetry.groups) == [2, 4, 4]
    assert {fixed.name for fixed in symmetry.fixed if fixed.reason == SINGLE_ORDER} >= {
        "q.weight",
        "v.weight",
        "out.weight",
    }


@pytest.mark.parametrize("mix", [lambda x: x.softmax(1), lambda x: F.layer_norm(x.mT, [2]).mT], ids=["softmax", "norm"])
def test_mixed_blocks_have_one_order(mix, monkeypatch):
    """The result is not that of a failed verification, which tests each group separately."""
    proofs, true = [], Verifier.is_invariant
    monkeypatch.setattr(
        Verifier, "is_invariant", lambda verifier, groups: proofs.append(true(verifier, groups)) or proofs[-1]
    )
    network = Calls(
        lambda net, x: net.head(mix(net.first(x).unflatten(1, (2, 3))).flatten(1)),
        first=nn.Linear(4, 6),
        head=nn.Linear(6, 2),
    )
    assert sorted(group.size for group in found_in(network, torch.randn(2, 4)).groups) == [2, 3]
    assert proofs == [True]


def test_two_groups_that_hold_only_together_are_distinguished(monkeypatch):
    from enfold.symmetry import tracer

    monkeypatch.setitem(tracer.RULES, "mul", lambda _, x, y: x)  # as if the two were independent
    network = Calls(lambda net, x: net.head(net.one(x) * net.two(x)), head=nn.Linear(2, 3))
    network.one, network.two = nn.Linear(4, 2), nn.Linear(4, 2)
    symmetry = symmetries(network, torch.zeros(2, 4))
    assert not symmetry.groups
    reasons = {fixed.reason for fixed in symmetry.fixed if fixed.name in ("one.bias", "two.bias")}
    assert reasons == {"a random order along it changes the outputs"}


def test_float32_inside_a_network_does_not_hide_its_symmetries():
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.first(x)
        wide = x.to(torch.float32)
        normed = net.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        memory = torch.zeros(len(x), 6) + normed.float()
        return net.head(memory @ net.mix.weight)

    parts = {"first": nn.Linear(4, 6), "mix": nn.Linear(6, 6, bias=False), "head": nn.Linear(6, 3)}
    symmetry = found_in(Calls(forward, **parts, scale=nn.Parameter(torch.ones(6))), torch.randn(2, 4))
    assert [group.size for group in symmetry.groups] == [6, 6]
    assert {"scale", "first.bias", "mix.weight"} == names_of(symmetry, "scale") - {"first.weight"}


def test_pooling_over_transposed_tokens_keeps_the_channels():
    network = Calls(
        lambda net, x: net.head(net.pool(torch.relu(net.first(x)).transpose(1, 2)).flatten(1)),
        first=nn.Linear(3, 6), pool=nn.AdaptiveAvgPool1d(1), head=nn.Linear(6, 2),
    )  # fmt: skip
    symmetry = found_in(network, torch.randn(2, 5, 3))
    assert names_of(symmetry, "first") == {"first.weight", "first.bias", "head.weight"}


def test_units_of_rows_that_are_added_at_indices():
    def forward(net: Calls, x: Tensor) -> Tensor:
        x = net.first(x)
        held = torch.zeros_like(x).index_add_(0, torch.tensor([1, 0]), net.second(torch.relu(x)))
        return net.head(x + held)

    network = Calls(forward, first=nn.Linear(3, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 2))
    symmetry = found_in(network, torch.randn(2, 3))
    assert names_of(symmetry, "first") == {f"{name}.weight" for name in ("first", "second", "head")} | {
        "first.bias",
        "second.bias",
    }


class Deciding(nn.Module):
    """Two blocks; the second is run if the first says so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        return x + self.two(x) if x.sum() > 0 else x - self.two(x)


def test_modules_called_by_data_dependent_modules_are_permuted():
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), Deciding(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)]
    network = nn.Sequential(*layers)
    symmetry = found_in(network, torch.randn(3, 4))
    assert [group.name for group in symmetry.groups] == ["0", "3.one.0", "3.two.0", "4"]  # nothing across its border
    assert names_of(symmetry, "3.one.0") == {"3.one.0.weight", "3.one.0.bias", "3.one.2.weight"}
    decides = "in '3' decides by a value"
    assert decides in symmetry.note
    fixed = {(fixed.name, fixed.axis): fixed.reason for fixed in symmetry.fixed}
    for place in (("2.bias", 0), ("3.one.0.weight", 1), ("3.one.2.bias", 0), ("4.weight", 1)):
        assert decides in fixed[place]


def test_data_dependent_modules_pass_no_units_between_their_modules():
    def forward(net: Calls, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.second(hidden) if bool((x > 1e6).any()) else net.third(hidden)

    network = Calls(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 3), third=nn.Linear(5, 3))
    assert not symmetries(network, torch.zeros(2, 4)).groups  # the branch not taken has the other order


@pytest.mark.filterwarnings("ignore::enfold.merge.common.states.UnalignedWarning")
@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_data_dependent_members_are_matched_where_possible(factor):
    torch.manual_seed(0)
    first = Deciding()
    symmetry = symmetries(first, torch.zeros(2, 5))
    second = copy.deepcopy(first)
    orders = {group.name: torch.randperm(group.size) for group in symmetry.groups}
    second.load_state_dict(permute(first.state_dict(), symmetry, orders))
    with pytest.warns(UnalignedWarning, match="graph depends on values"):
        matched = align(DeepEnsemble([first, second]), example=torch.zeros(2, 5))
    inputs = factor * torch.randn(3, 5)
    for index in range(2):
        torch.testing.assert_close(matched.member(index)(inputs), first(inputs))
    torch.testing.assert_close(dict(matched.member(1).state_dict()), dict(first.state_dict()))


class Gate(nn.Module):
    """Gives its caller a value that is no tensor."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(4, 1), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.inner(x).mean())


@dataclass
class Held:
    """A tensor in an object."""

    values: Tensor


class Holding(nn.Module):
    """Gives and takes tensors in objects."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | Held) -> Any:
        return self.layer(x.values) if isinstance(x, Held) else Held(self.layer(x))


def by_gate(net: Calls, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.second(hidden) if net.gate(x) else net.third(hidden)


def by_shape(net: Calls, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.second(hidden) if len(x[x > 0]) > 3 else net.third(hidden)


def by_places(net: Calls, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.second(hidden) if len((x[:, 0] > 0).nonzero()) else net.third(hidden)


def by_array(net: Calls, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.second(hidden) if x.numpy().sum() > 0 else net.third(hidden)


@pytest.mark.parametrize(
    ("forward", "more"),
    [
        (by_gate, {"gate": Gate(lambda x: bool(x > 0))}),
        (by_gate, {"gate": Gate(lambda x: [each for each in [x.tolist()] if each > 0])}),
        (by_shape, {}),
        (by_places, {}),
        (by_array, {}),
    ],
    ids=["a child's answer", "a child's list", "a mask's count", "places", "an array"],
)
def test_data_dependent_control_flow_is_detected(forward, more):
    network = Calls(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 3), third=nn.Linear(5, 3), **more)
    symmetry = symmetries(network, torch.randn(2, 4))
    assert not symmetry.groups
    assert "decides by a value" in symmetry.note


def test_tensors_inside_objects_are_found():
    def forward(net: Calls, x: Tensor) -> Tensor:
        held = net.first(x)
        return net.second(held) if x.sum() > 0 else net.third(held)

    parts = (Holding(nn.Linear(4, 5)), Holding(nn.Linear(5, 3)), Holding(nn.Linear(5, 3)))
    network = Calls(forward, **dict(zip(("first", "second", "third"), parts, strict=True)))
    assert not symmetries(network, torch.randn(2, 4)).groups


def test_constants_in_float32_do_not_hide_a_group():
    basis = torch.eye(4)

    def forward(net: Calls, x: Tensor) -> Tensor:
        return net.head(torch.relu(net.first((x.float() @ basis).to(x.dtype))))

    network = Calls(forward, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
    assert [group.name for group in symmetries(network, torch.randn(2, 4)).groups] == ["first"]


def test_float64_buffers_are_supported():
    def forward(net: Calls, x: Tensor) -> Tensor:
        return net.head(torch.relu(net.first((x - net.mean).float())))

    network = Calls(forward, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
    network.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert [group.name for group in symmetries(network, torch.randn(2, 4)).groups] == ["first"]


def test_both_halves_of_a_gated_layer_are_permuted_together():
    network = nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 5), nn.GLU(dim=-2), nn.Linear(5, 3))
    (gated, _) = symmetries(network, torch.randn(2, 8, 4)).groups
    assert [str(axis) for axis in gated.axes] == [
        "0.weight[0]",
        "0.weight[0] from 6",
        "0.bias[0]",
        "0.bias[0] from 6",
        "2.weight[1]",
    ]
