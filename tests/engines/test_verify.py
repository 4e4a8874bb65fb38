"""Members are compared with their own networks, and run separately where the code of one network is not enough."""

import functools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from differing import DIFFERENT, Net, blobs
from enfold import (
    BatchEnsemble,
    DeepEnsemble,
    EnfoldError,
    MixedEnsemble,
    TrainConfig,
    evaluate,
    fit,
)
from enfold.errors import SeparateModulesWarning
from enfold.merge import average
from zoo import vectors


def over_self(make):
    """Networks whose function refers to the network itself."""

    def build(seed):
        network = Net(seed, lambda net, x: net.block(x.relu()), middle=lambda: nn.Linear(8, 8))
        network.block = make(network)
        return network

    return lambda: [build(seed) for seed in range(3)]


def with_hook(seed):
    network = Net(seed, lambda net, x: x.relu(), gain=lambda: nn.Parameter(torch.rand(8) + 0.5))
    network.first.register_forward_hook(lambda module, inputs, output: output * network.gain)
    return network


def keeping_features(seed):
    network = Net(seed, lambda net, x: net.kept["first"].relu())
    network.kept = {}
    network.first.register_forward_hook(lambda module, inputs, output: network.kept.__setitem__("first", output))
    return network


def recursive(network):
    def block(x, depth=2):
        return block(network.middle(x), depth - 1) if depth else x

    return block


OVER_SELF = {
    "a lambda": over_self(lambda network: lambda x: x + network.middle(x)),
    "a lambda's default": over_self(lambda network: lambda x, middle=network.middle: x + middle(x)),
    "a lambda over a list": over_self(lambda network: (lambda layers: lambda x: x + layers[0](x))([network.middle])),
    "a partial of a lambda": over_self(
        lambda network: functools.partial(lambda x, scale: x + scale * network.middle(x), scale=2.0)
    ),
    "a bound method": over_self(lambda network: network.middle.forward),
    "a recursive function": over_self(recursive),
    "a weak reference": over_self(lambda network: (lambda ref: lambda x: x + ref().middle(x))(weakref.ref(network))),
    "a hook": lambda: [with_hook(seed) for seed in range(3)],
    "a hook that keeps features": lambda: [keeping_features(seed) for seed in range(3)],
}


class CachedHead(nn.Module):
    """Keeps its normalised weights in eval mode, and forgets them when the mode is set."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(3, 8))
        self.cached = None

    def train(self, mode=True):
        self.cached = None
        return super().train(mode)

    def forward(self, x):
        if self.training:
            weight = F.normalize(self.weight, dim=1)
        else:
            if self.cached is None:
                self.cached = F.normalize(self.weight, dim=1).detach()
            weight = self.cached
        return 10 * F.normalize(self.body(x).relu(), dim=1) @ weight.t()


def gradients(network, x):
    network.zero_grad()
    torch.manual_seed(0)
    network(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def check_equal(networks, engine="auto"):
    """Outputs in eval and in train mode, gradients, extracted members and copies of the ensemble."""
    x = vectors(5)
    members = DeepEnsemble(networks, engine=engine)
    for network in networks:
        network.eval()
    members.eval()
    with torch.no_grad():
        expected = torch.stack([network(x) for network in networks])
        torch.testing.assert_close(members(x), expected)
        torch.testing.assert_close(torch.stack([members.member(k).eval()(x) for k in range(len(networks))]), expected)
    for network in networks:
        network.train()
    members.train()
    own = [gradients(network, x) for network in networks]
    before = {id(p): p.grad.clone() for network in networks for p in network.parameters()}
    torch.manual_seed(0)
    outputs = members(x)
    taken = dict(members.tree.named_parameters())
    grads = torch.autograd.grad(outputs.square().sum(), list(taken.values()))
    if not any("dropout" in type(module).__name__.lower() for module in networks[0].modules()):
        for (name, _), grad in zip(taken.items(), grads, strict=True):
            for k, alone in enumerate(own):
                if not isinstance(getattr(networks[k], "value", None), float):  # one random state for all members
                    torch.testing.assert_close(grad[k], alone[name], rtol=1e-4, atol=1e-5)
    for network in networks:  # nothing has reached the networks given
        assert all(torch.equal(p.grad, before[id(p)]) for p in network.parameters())
    return members


@pytest.mark.parametrize("kind", DIFFERENT)
def test_networks_that_differ_in_more_than_parameters_run_separately(kind):
    with pytest.warns(SeparateModulesWarning, match="member 1"):
        check_equal(DIFFERENT[kind]())


@pytest.mark.parametrize("kind", OVER_SELF)
def test_functions_over_self_use_the_members_values(kind):
    members = check_equal(OVER_SELF[kind]())
    assert not members.is_separate


@pytest.mark.parametrize("kind", OVER_SELF)
def test_an_efficient_ensemble_does_not_depend_on_the_network_given(kind):
    network = OVER_SELF[kind]()[0]
    members = BatchEnsemble(network, 2).eval()
    before = members(vectors(4)).detach()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    torch.testing.assert_close(members(vectors(4)).detach(), before)


def test_training_trains_what_a_lambda_over_self_uses():
    networks = OVER_SELF["a lambda"]()
    start = [network.middle.weight.detach().clone() for network in networks]
    members, data = DeepEnsemble(networks), blobs()
    fit(members, data, config=TrainConfig(epochs=2, batch_size=8, select="last"), quiet=True)
    for k, network in enumerate(networks):
        assert torch.equal(network.middle.weight, start[k])  # left as it was
        assert not torch.equal(members.member(k).middle.weight, start[k])


def test_caches_of_weights_are_each_members_own():
    networks = [CachedHead(seed).eval() for seed in range(3)]
    members, expected = DeepEnsemble(networks).eval(), torch.stack([network(vectors(5)) for network in networks])
    with pytest.warns(SeparateModulesWarning):
        outputs = members(vectors(5))
    torch.testing.assert_close(outputs, expected)
    data = blobs()
    fit(members, data, config=TrainConfig(epochs=2, batch_size=8), quiet=True)
    alone = evaluate(MixedEnsemble([member.eval() for member in members]), data)
    assert evaluate(members, data).scores["nll"] == pytest.approx(alone.scores["nll"], rel=1e-5)


class Biased(nn.Module):
    """A network that caches a bias in eval mode, which has next to no effect at first, and keeps its features."""

    def __init__(self):
        super().__init__()
        self.body, self.bias, self.gain = nn.Linear(6, 3), nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.0))
        self.cache, self.frequencies, self.features = {}, None, None

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)

    def forward(self, x):
        if self.frequencies is None:
            self.frequencies = torch.arange(3.0)  # of no member
        self.features = self.body(x)
        if not self.training and "bias" not in self.cache:
            self.cache["bias"] = torch.exp(self.bias).detach()
        bias = torch.exp(self.bias) if self.training else self.cache["bias"]
        return self.features + 1e-6 * (1e6 * self.gain**8 + 1) * bias + self.frequencies


@pytest.mark.parametrize("efficient", [False, True])
def test_caches_are_found_while_their_effect_is_small(efficient):
    members = BatchEnsemble(Biased(), 3) if efficient else DeepEnsemble(Biased, 3)
    with pytest.warns(SeparateModulesWarning, match=r"cache\.bias.*which a call computes and the next one uses"):
        members.eval()(vectors(5))
    with torch.no_grad():
        for name, parameter in members.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(1.0)
            if name.endswith("bias") and "body" not in name:
                parameter.add_(torch.rand_like(parameter))
    outputs = members.train().eval()(vectors(5))
    torch.testing.assert_close(outputs, torch.stack([member.eval()(vectors(5)) for member in members]))


def test_features_and_constants_in_attributes_do_not_separate_members():
    class Kept(Biased):
        def forward(self, x):
            self.cache["bias"] = torch.exp(self.bias)
            return super().forward(x)

    members = DeepEnsemble(Kept, 3).eval()
    members(vectors(5))
    assert members.is_separate is False


def test_caches_of_weights_in_an_efficient_ensemble():
    members = BatchEnsemble(CachedHead(0), 3, include=("body",)).eval()
    with pytest.warns(SeparateModulesWarning):
        outputs = members(vectors(5))
    torch.testing.assert_close(outputs, torch.stack([member.eval()(vectors(5)) for member in members]))


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
def test_an_engine_that_shares_code_is_refused(engine):
    with pytest.raises(EnfoldError, match=engine):
        DeepEnsemble(DIFFERENT["a float"](), engine=engine)(vectors(4))


def test_weights_of_different_functions_cannot_be_averaged():
    with pytest.warns(SeparateModulesWarning), pytest.raises(EnfoldError, match="same function"):
        average(DeepEnsemble(DIFFERENT["an activation function"]()), blobs())


def test_training_runs_every_members_own_code():
    networks = DIFFERENT["an activation function"]()
    members = DeepEnsemble(networks)
    with pytest.warns(SeparateModulesWarning):
        fit(members, blobs(), config=TrainConfig(epochs=2, batch_size=8, select="last"), quiet=True)
    alone = DeepEnsemble([networks[1]])
    fit(alone, blobs(), config=TrainConfig(epochs=2, batch_size=8, select="last", first_member=1), quiet=True)
    torch.testing.assert_close(members.member(1).first.weight, alone.member(0).first.weight)


def test_networks_that_agree_share_their_code():
    members = DeepEnsemble([Net(seed, lambda net, x: x.relu()) for seed in range(3)])
    members(vectors(4))
    assert members.is_separate is False


def test_a_lock_is_shared_and_what_cannot_be_copied_is_named():
    networks = [Net(seed, lambda net, x: x.relu()) for seed in range(2)]
    for network in networks:
        network.lock = threading.Lock()
    assert DeepEnsemble(networks)(vectors(4)).shape == (2, 4, 3)
    networks[0].stream = (number for number in range(3))
    with pytest.raises(EnfoldError, match="'stream'"):
        DeepEnsemble(networks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_name():
    network = nn.Sequential(nn.Linear(6, 3), torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3)))
    with pytest.raises(EnfoldError, match="'1' is a scripted"):
        DeepEnsemble([network, network])


def test_parameters_in_lists_are_those_of_the_member():
    networks = [Net(seed, lambda net, x: x.relu() * net.held[0].mean()) for seed in range(3)]
    for network in networks:
        network.held = [network.first.weight]
    check_equal(networks)


def test_recurrent_networks_train_and_can_be_extracted():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.cell(x.unsqueeze(1))[0][:, -1])

    members = DeepEnsemble([Recurrent() for _ in range(2)])
    for _ in range(2):
        members(vectors(4)).sum().backward()
        torch.optim.SGD(members.parameters(), lr=0.1).step()
        member = members.member(0)
        torch.testing.assert_close(member(vectors(4)), members(vectors(4))[0])


def test_embeddings_that_renormalise_do_so_for_each_member():
    def make():
        return nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))

    networks, x = [make() for _ in range(3)], torch.randint(0, 9, (5, 2))
    members = DeepEnsemble(networks)
    expected = torch.stack([network(x) for network in networks])
    outputs = members(x)
    torch.testing.assert_close(outputs, expected)
    outputs.sum().backward()
    for k, network in enumerate(networks):
        torch.testing.assert_close(members.member(k)[0].weight, network[0].weight)


@pytest.mark.parametrize("make", ["mlp", "cnn"])
def test_the_first_step_costs_at_most_one_more(make):
    """Comparison and choice of an engine take a few rows: less than one forward and backward pass of the ensemble."""

    def network():
        if make == "mlp":
            return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))

    members = DeepEnsemble(network, 4).train()
    inputs = torch.randn(64, 6) if make == "mlp" else torch.randn(64, 1, 6, 6)
    taken = []
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            members(inputs).sum().backward()
        taken.append(counter.get_total_flops())
    assert taken[1] == taken[2] > 0
    assert taken[0] - taken[1] <= taken[1]
