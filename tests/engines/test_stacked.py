"""DeepEnsemble products: what they compute, and what they must refuse."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from enfold import DeepEnsemble, EnfoldError
from enfold.engines.base import CannotRun
from enfold.engines.skeleton import Skeleton
from enfold.engines.stacked import LAYERS, StackedProgram, Value, linear
from zoo import Apply, population, vectors


@settings(max_examples=25, deadline=None)
@given(
    num_members=st.integers(1, 4),
    batch=st.integers(0, 20),
    between=st.lists(st.integers(1, 3), max_size=2),
    features=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    merged=st.booleans(),
)
def test_each_member_has_its_own_linear_layer(num_members, batch, between, features, bias, merged):
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(num_members, features[1], features[0], generator=rng)
    own = {"weight": weight, **({"bias": torch.randn(num_members, features[1], generator=rng)} if bias else {})}
    inputs = torch.randn(num_members if merged else 1, batch, *between, features[0], generator=rng)
    value = Value(inputs.flatten(0, 1) if merged else inputs[0], merged)
    found = linear(nn.Linear(*features), own, value, num_members)
    expected = [
        F.linear(inputs[k if merged else 0], weight[k], own["bias"][k] if bias else None) for k in range(num_members)
    ]
    torch.testing.assert_close(found.tensor, torch.cat(expected))
    torch.testing.assert_close(found.split(num_members), torch.stack(expected))


def test_an_empty_batch_gives_an_empty_output():
    for name in ("mlp", "layer_norm", "batch_norm_2d"):
        members = DeepEnsemble(population(name)).eval()
        inputs = torch.zeros(0, *{"batch_norm_2d": (2, 8, 8)}.get(name, (6,)))
        assert members(inputs).shape == (3, 0, 3)  # before an engine is chosen
    members = DeepEnsemble(population("layer_norm"), engine="stacked").eval()
    members(vectors(2))
    assert members(vectors(0)).shape == (3, 0, 3)


def test_dropout_draws_for_every_member_and_only_in_training():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6, bias=False), nn.Dropout(0.5))
    nn.init.eye_(network[1].weight)
    members = DeepEnsemble([network, network], engine="stacked").train()
    outputs = members(torch.ones(200, 6))
    assert set(outputs.unique().tolist()) == {0.0, 4.0}
    assert not torch.equal(outputs[0], outputs[1])
    assert 0.2 < float((outputs > 0).float().mean()) < 0.3
    torch.testing.assert_close(members.eval()(torch.ones(4, 6)), torch.ones(2, 4, 6))


@pytest.mark.parametrize("engine", ["stacked", "loop", "vmap"])
def test_dropout_before_the_first_layer_is_each_members_own(engine):
    """All members have the same value there, but different dropout masks."""
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6, bias=False))
    nn.init.eye_(network[1].weight)
    outputs = DeepEnsemble([network, network], engine=engine).train()(torch.ones(200, 6))
    assert set(outputs.unique().tolist()) == {0.0, 2.0}
    agreement = float((outputs[0] == outputs[1]).float().mean())
    assert 0.4 < agreement < 0.6  # of independent masks; a shared one agrees everywhere


def refusal(network, inputs=None):
    with pytest.raises(EnfoldError) as caught:
        DeepEnsemble([network, network], engine="stacked")(vectors(4) if inputs is None else inputs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(6, 3)], "a Conv1d, has no stacked form"),
        ([nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)], "cumulative average"),
        ([nn.Linear(6, 3), nn.PReLU()], "'1', a PReLU, has no stacked form"),
        ([nn.Linear(6, 3), nn.Softmax(dim=0)], "gives other outputs"),
        ([nn.Linear(6, 3), nn.Flatten(0), nn.Unflatten(0, (-1, 3))], "an operation mixes the examples"),
    ],
)
def test_an_unsupported_layer_is_refused_with_a_reason(layers, reason):
    assert reason in refusal(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"padding_idx": 0}, "padding row"),
        ({"max_norm": 1.0}, "renormalises, rescales or is sparse"),
        ({"scale_grad_by_freq": True}, "renormalises, rescales or is sparse"),
        ({"sparse": True}, "renormalises, rescales or is sparse"),
    ],
)
def test_embeddings_that_are_more_than_a_table_are_refused(options, reason):
    network = nn.Sequential(nn.Embedding(9, 4, **options), nn.Flatten(), nn.Linear(8, 3))
    assert reason in refusal(network, torch.ones(4, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda net, x: net.layer(x) + net.offset, "uses the parameter or buffer 'offset'"),
        (lambda net, x: net.layer(x) - net.layer(x).mean(0, keepdim=True), "an operation mixes the examples"),
        (lambda net, x: net.layer(x) * (net.layer(x).sum() > 1e9), "an operation mixes the examples"),
        (lambda net, x: net.layer(x).roll(1, 0), "gives other outputs"),
        (lambda net, x: {"logits": net.layer(x)}, "does not return one tensor"),
        (lambda net, x: net.layer(x)[: x.shape[0]], "an operation mixes the examples"),
        (lambda net, x: net.layer(x) + torch.rand(1).item(), "draws random numbers"),
        (lambda net, x: net.layer(x) + random.gauss(), "draws random numbers"),
        (lambda net, x: net.layer(x) + np.random.rand(), "draws random numbers"),
        (lambda net, x: net.layer(x) + torch.rand_like(x[:, :3]), "gives other outputs"),
        (lambda net, x: F.dropout(net.layer(x), 0.5), "gives other outputs"),
        (lambda net, x: F.dropout(net.layer(x), 1e-9, net.training), "depends on `training`"),
        (lambda net, x: net.layer(x) if x.shape[0] > 2 else x[:, :3], "cannot be traced (TraceError"),
        (lambda net, x: net.layer(input=x), "keyword argument"),
    ],
)
def test_a_forward_that_cannot_be_merged_is_refused(forward, reason):
    assert reason in refusal(Apply(forward, layer=nn.Linear(6, 3), offset=torch.ones(3)))


def test_an_optional_argument_has_its_default():
    class Two(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x) if mask is None else x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, mask=None):
            return self.layer(x) if mask is None else x

    for make in (Net, lambda: Two(6, 3)):
        members = DeepEnsemble([make(), make()])
        expected = torch.stack([network(vectors(4)) for network in members])
        torch.testing.assert_close(members(vectors(4)), expected)
    assert isinstance(DeepEnsemble(Net, 2).choose_engine(vectors(4)), StackedProgram)


@pytest.mark.parametrize("part", [0, 2, None])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_run_not_traced(part, register):
    calls = []
    networks = population("mlp", 2)
    for network in networks:
        getattr(network if part is None else network[part], register)(lambda *given: calls.append(given[0]))
    members = DeepEnsemble(networks)
    for _ in range(2):
        calls.clear()
        members(vectors(4))
    assert len(calls) == 2
    with pytest.raises(EnfoldError, match="has hooks"):
        members.set_engine("stacked")(vectors(4))


@pytest.mark.parametrize("inputs", [vectors(1), vectors(8), torch.zeros(4, 6)])
def test_mixed_examples_are_detected_with_equal_members(inputs):
    """Merged with its own copies, a batch has its own mean: the engine must not be chosen by that."""
    for name in ("mixing", "mixing_inputs", "mixing_by_softmax", "mixing_behind_zeros"):
        network = population(name, 1)[0]
        members = DeepEnsemble([network] * 3)
        members(inputs)
        with torch.no_grad():
            for parameter in members.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        own = torch.stack([vectors(5), vectors(6)[:5], vectors(7)[:5]])
        expected = torch.stack([net(x) for net, x in zip(members, own, strict=True)])
        torch.testing.assert_close(members.forward_each(own), expected)


def test_tracing_leaves_no_state():
    def forward(net, x):
        net.last = x
        return net.layer(x) + torch.tensor([1.0, 2.0, 3.0])  # which tracing would attach to the network

    skeleton = Skeleton(Apply(forward, layer=nn.Linear(6, 3)))
    before = dict(vars(skeleton.network))
    with pytest.raises(CannotRun, match="outside a layer"):
        StackedProgram(skeleton, vectors(4))
    assert vars(skeleton.network) == before


def test_the_layers_with_a_stacked_form_are_listed_once():
    assert set(LAYERS) == {nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.Embedding}


def test_a_subclass_of_a_layer_is_not_taken_for_the_layer():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    networks = [nn.Sequential(nn.Linear(6, 6), Doubled(6, 3)) for _ in range(2)]
    inputs = vectors(3)
    torch.testing.assert_close(DeepEnsemble(networks)(inputs), torch.stack([network(inputs) for network in networks]))


class Rounded(torch.autograd.Function):
    """A straight-through estimator: rounds in the forward pass and is the identity in the backward pass."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    """The identity with a negative gradient."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class OwnGradient(nn.Module):
    def __init__(self, between, frozen=False):
        super().__init__()
        self.between = between
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.requires_grad_(not frozen)

    def forward(self, inputs):
        return self.last(self.between(self, inputs))


def gated(network, inputs):
    with torch.no_grad():
        gate = network.gate(inputs).sigmoid()
    return network.first(inputs) * gate


BETWEEN = {
    "no_grad": gated,
    "straight-through": lambda network, inputs: Rounded.apply(network.first(inputs)),
    "reversal": lambda network, inputs: Reversed.apply(network.first(inputs)),
}


@pytest.mark.parametrize("engine", ["auto", "stacked"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_gradients_that_a_trace_does_not_contain_are_those_of_the_networks(between, frozen, engine):
    networks = [OwnGradient(between, frozen) for _ in range(3)]
    inputs, own = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    members = DeepEnsemble(copy.deepcopy(networks), engine=engine)
    if engine == "stacked":
        with pytest.raises(EnfoldError, match="gradients"):
            members(inputs)
        return
    members(inputs).square().sum().backward()
    sum(network(own).square().sum() for network in networks).backward()
    torch.testing.assert_close(inputs.grad, own.grad, rtol=1e-4, atol=1e-5)
    for index, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            stacked = dict(members.tree.named_parameters())[name].grad
            found = torch.zeros_like(parameter) if stacked is None else stacked[index]
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
