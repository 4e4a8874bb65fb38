"""Every member computes the function of its own network, for any difference between networks."""

import functools
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from enfold import (
    BatchEnsemble,
    Data,
    DeepEnsemble,
    EnfoldError,
    MixedEnsemble,
    Split,
    TrainConfig,
    evaluate,
    fit,
    load,
    save,
)
from enfold.errors import SeparateModulesWarning
from enfold.merge import average
from zoo import vectors


class Net(nn.Module):
    """Two layers with any module between them."""

    def __init__(self, seed, between, **attributes):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            for name, value in attributes.items():
                setattr(self, name, value() if callable(value) and not isinstance(value, nn.Module) else value)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def same_name(activation):
    """A class of one name in a module of its own."""
    module = types.ModuleType(f"net_{activation}")
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)\n"
        f"    def forward(self, x):\n        return self.last(torch.{activation}(self.first(x)))\n"
    )
    exec(code, vars(module))  # noqa: S102
    return module.Net()


def attribute(values, between):
    networks = [Net(seed, between) for seed in range(len(values))]
    for network, value in zip(networks, values, strict=True):
        network.value = value
    return networks


def masks(seed):
    return torch.rand(8, generator=torch.Generator().manual_seed(seed)) + 0.5


def hidden_layer(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(8, 8)


DIFFERENT = {
    "an activation function": lambda: attribute([torch.relu, torch.tanh], lambda net, x: net.value(x)),
    "a float": lambda: attribute([0.01, 0.9], lambda net, x: F.leaky_relu(x, net.value)),
    "a flag": lambda: attribute([True, False], lambda net, x: x.relu() if net.value else x),
    "a dictionary": lambda: attribute([{"p": 1.0}, {"p": 3.0}], lambda net, x: x.relu() * net.value["p"]),
    "a list of columns": lambda: attribute([[0, 1, 2, 3] * 2, [7, 6, 5, 4] * 2], lambda net, x: x.relu()[:, net.value]),
    "a partial": lambda: attribute(
        [functools.partial(F.leaky_relu, negative_slope=s) for s in (0.0, 0.8)], lambda net, x: net.value(x)
    ),
    "a plain tensor": lambda: attribute([masks(0), masks(1)], lambda net, x: x.relu() * net.value),
    "tensors in a list": lambda: attribute([[masks(0)], [masks(1)]], lambda net, x: x.relu() * net.value[0]),
    "layers in a list": lambda: attribute(
        [[hidden_layer(0)], [hidden_layer(1)]], lambda net, x: net.value[0](x.relu()).relu()
    ),
    "classes of one name": lambda: [same_name("relu"), same_name("tanh")],
    "a rate of dropout in train mode": lambda: attribute(
        [0.1, 0.9], lambda net, x: F.dropout(x.relu(), net.value, net.training)
    ),
}


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


def blobs():
    x, y = vectors(24), torch.arange(24) % 3
    return Data(Split(x, y), Split(x[:8], y[:8]), Split(x[8:16], y[8:16]), num_classes=3, shape=(6,))


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


class InPlace(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        x -= 0.5
        x /= 0.25
        return self.layer(x)


@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("each", [False, True])
def test_in_place_changes_of_inputs_do_not_affect_other_members(layer, each):
    def make():
        if layer == "linear":
            return InPlace(nn.Linear(6, 3))
        return InPlace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)))

    networks = [make().eval() for _ in range(3)]
    x = vectors(70) if layer == "linear" else torch.rand(70, 1, 3, 3)
    given = torch.stack([x, x + 1, x + 2]) if each else x
    kept = given.clone()
    members = DeepEnsemble(networks).eval()
    run = members.forward_each if each else members
    for _ in range(2):
        with torch.no_grad():
            outputs = run(given)
        assert torch.equal(given, kept)
        own = kept if each else kept.expand(3, *kept.shape)
        expected = [network(rows.clone()) for network, rows in zip(networks, own, strict=True)]
        torch.testing.assert_close(outputs, torch.stack(expected))
    run(given).sum().backward()
    assert torch.equal(given, kept)
    mixed = MixedEnsemble(networks).eval()
    torch.testing.assert_close(mixed(x), members(x))
    assert torch.equal(given, kept)


def test_a_saved_ensemble_is_loaded_only_into_networks_that_compute_the_same(tmp_path):
    networks = DIFFERENT["an activation function"]()
    members = DeepEnsemble(networks).eval()
    with pytest.warns(SeparateModulesWarning):
        outputs = members(vectors(5))
    file = save(members, tmp_path / "members.safetensors")
    with pytest.warns(SeparateModulesWarning):
        loaded = load(file, networks)
    torch.testing.assert_close(loaded(vectors(5)), outputs)
    with pytest.raises(EnfoldError, match="list"):
        load(file, networks[0])


def scaled(values, between=lambda net, x: x.relu() * net.value):
    return attribute(values, between)


def outputs_of(networks, x):
    return torch.stack([network(x) for network in networks])


def test_a_failing_first_call_has_no_effect():
    networks = scaled([1.0, 5.0])
    members = DeepEnsemble(networks)
    with pytest.raises(EnfoldError):
        members(torch.zeros(4, 7))
    with pytest.warns(SeparateModulesWarning):
        outputs = members(vectors(4))
    torch.testing.assert_close(outputs, outputs_of(networks, vectors(4)))


def test_values_outside_the_input_range_are_not_tried():
    def between(net, x):
        if bool((net.spread <= 0).any()):
            raise ValueError("a spread must be above 0")
        return x.relu() * net.value / net.spread

    networks = scaled([1.0, 5.0], between)
    for network in networks:
        network.spread = nn.Parameter(torch.full((8,), 0.01))
    with pytest.warns(SeparateModulesWarning):
        outputs = DeepEnsemble(networks)(vectors(4))
    torch.testing.assert_close(outputs, outputs_of(networks, vectors(4)))


def test_train_mode_is_compared_when_a_batch_allows_it():
    def between(net, x):
        return net.norm(x) * (net.value if net.training else 1.0)

    networks = scaled([1.0, 5.0], between)
    for network in networks:
        network.norm = nn.BatchNorm1d(8)
        network.eval()
        del network.value
        network.register_buffer("value", torch.tensor(1.0), persistent=False)
        network.value = torch.tensor(1.0)
    networks[1].between = lambda net, x: net.norm(x) * (5.0 if net.training else 1.0)
    members = DeepEnsemble(networks).eval()
    with pytest.warns(SeparateModulesWarning):
        members(vectors(1))  # a batch of one cannot be normalised in train mode; the functions differ visibly
    members.train()
    for network in networks:
        network.train()
    torch.testing.assert_close(members(vectors(6)), outputs_of(networks, vectors(6)))


@pytest.mark.parametrize("which", ["all in train mode", "one of them"])
def test_in_place_networks_get_a_copy_of_the_inputs(which):
    def between(net, x):
        return x.relu()

    class Writes(Net):
        def forward(self, x):
            if self.training if which == "all in train mode" else self.value:
                x.add_(1)
            return super().forward(x)

    networks = [Writes(seed, between) for seed in range(3)]
    for seed, network in enumerate(networks):
        network.value = seed != 1 if which == "one of them" else 0
    members, x = DeepEnsemble(networks).train(), torch.zeros(4, 6)
    if which == "one of them":
        with pytest.warns(SeparateModulesWarning):
            outputs = members(x)
    else:
        outputs = members(x)
    assert torch.equal(x, torch.zeros(4, 6))
    torch.testing.assert_close(outputs, torch.stack([network(torch.zeros(4, 6)) for network in networks]))


def test_settings_without_effect_on_the_first_examples_are_compared():
    networks = scaled([1.0, 3.0], lambda net, x: x.clamp(-net.value, net.value))
    x = torch.cat([vectors(3) * 0.01, vectors(3) * 100])
    with pytest.warns(SeparateModulesWarning, match="value"):
        outputs = DeepEnsemble(networks)(x)
    torch.testing.assert_close(outputs, outputs_of(networks, x))


def test_networks_count_their_own_calls():
    def between(net, x):
        net.calls += 1
        return x.relu() if net.calls > 4 else x

    networks = [Net(seed, between) for seed in range(3)]
    for network in networks:
        network.calls = 0
    members = DeepEnsemble(networks)
    for number in range(7):
        if number:
            outputs = members(vectors(4))
        else:
            with pytest.warns(SeparateModulesWarning, match="calls"):
                outputs = members(vectors(4))
        torch.testing.assert_close(outputs, outputs_of(networks, vectors(4)))


def test_a_buffer_filled_in_training_is_preserved():
    def between(net, x):
        if net.training:
            net.mean = x.detach().mean(0) if net.mean is None else 0.9 * net.mean + 0.1 * x.detach().mean(0)
        return x if net.mean is None else x - net.mean

    networks = [Net(seed, between) for seed in range(2)]
    for network in networks:
        network.register_buffer("mean", None)
    members = DeepEnsemble(networks)
    with pytest.warns(SeparateModulesWarning, match="mean"):
        members(vectors(5))
    outputs_of(networks, vectors(5))
    members.eval()
    for network in networks:
        network.eval()
    torch.testing.assert_close(members(vectors(4)), outputs_of(networks, vectors(4)))


def test_members_train_the_same_parameters():
    networks = [Net(seed, lambda net, x: x.relu()) for seed in range(2)]
    networks[1].first.weight.requires_grad_(False)
    with pytest.raises(EnfoldError, match=r"first\.weight"):
        DeepEnsemble(networks)


class Holder:
    """An object that is shared between copies."""

    def __init__(self, network):
        self.network = network

    def __deepcopy__(self, memo):
        return self

    def __call__(self, x):
        return self.network.middle(x)


def test_a_copy_that_uses_the_original_is_refused():
    networks = [Net(seed, lambda net, x: net.holder(x.relu()), middle=lambda: nn.Linear(8, 8)) for seed in range(2)]
    for network in networks:
        network.holder = Holder(network)
    with pytest.raises(EnfoldError, match=r"original.*middle\.(weight|bias)"):
        DeepEnsemble(networks)(vectors(4))
    assert all(parameter.grad is None for network in networks for parameter in network.parameters())


def test_networks_in_different_modes_keep_them():
    networks = [Net(seed, lambda net, x: net.norm(x), norm=lambda: nn.BatchNorm1d(8)) for seed in range(2)]
    networks[1].eval()
    with pytest.warns(SeparateModulesWarning, match="training"):
        outputs = DeepEnsemble(networks)(vectors(6))
    torch.testing.assert_close(outputs, outputs_of(networks, vectors(6)))


def test_members_can_be_extracted_while_another_thread_predicts():
    def make():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))

    members, x = DeepEnsemble([make() for _ in range(2)]).eval(), torch.randn(130, 1, 3, 3)
    for norm in (name for name in members.expand() if name.endswith("running_var")):
        members.expand()[norm].fill_(4.0)
    expected, stop = members(x).detach(), threading.Event()

    def predict():
        while not stop.is_set():
            with torch.no_grad():
                members(x)

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        taken = [members.member(0).eval()(x).detach() for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert all(torch.allclose(outputs, expected[0], atol=1e-4) for outputs in taken)


def test_members_that_were_never_called_are_saved_with_their_settings(tmp_path):
    networks = DIFFERENT["an activation function"]()
    file = save(DeepEnsemble(networks), tmp_path / "members.safetensors")
    with pytest.raises(EnfoldError, match="list"):
        load(file, networks[0])


def test_an_attribute_named_codes_is_preserved():
    network = Net(0, lambda net, x: x.relu())
    network.register_buffer("codes", torch.zeros(3))
    assert evaluate(network, blobs()).scores["nll"] > 0


def test_a_factory_with_its_own_seed_is_preserved():
    def make():
        torch.manual_seed(5)
        return nn.Linear(6, 3)

    with pytest.warns(UserWarning, match="equal"):
        members = DeepEnsemble(make, 2)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(members.member(0).weight, make().weight)


class Blocks(tuple):
    """A sequence that is iterated, but has no length."""

    def __len__(self):
        raise NotImplementedError


def test_sequences_without_a_length_are_compared():
    same, other = (attribute([Blocks((0, 1)), Blocks(last)], lambda net, x: x.relu()) for last in ((0, 1), (0, 2)))
    with torch.no_grad():
        members = DeepEnsemble(same)
        members(torch.randn(4, 6))
        assert members.mismatch is None
        with pytest.warns(SeparateModulesWarning, match="value"):
            DeepEnsemble(other)(torch.randn(4, 6))
