"""Verified members: inputs changed in place, buffers, modes, copies, threads and saved files."""

import threading

import pytest
import torch
from torch import nn

from differing import DIFFERENT, Net, attribute, blobs
from enfold import (
    DeepEnsemble,
    EnfoldError,
    MixedEnsemble,
    evaluate,
    load,
    save,
)
from enfold.errors import SeparateModulesWarning
from zoo import vectors


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


@pytest.mark.parametrize("of", [lambda weight: weight.detach(), lambda weight: weight], ids=["detached", "attached"])
def test_an_attribute_that_is_a_view_of_a_parameter_is_refused(of):
    """In a copy it is a constant, which no training changes."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.first = of(self.layer.weight)[:4]

        def forward(self, x):
            return self.layer(x).relu() @ self.first.T

    with pytest.raises(EnfoldError, match=r"attribute 'first' of Halves is a view of the parameter 'layer\.weight'"):
        DeepEnsemble(Halves, 2)(vectors(4))


def test_an_attribute_that_every_call_sets_may_be_a_view_of_a_parameter():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.weight = self.layer.weight.detach().T

        def forward(self, x):
            self.weight = self.layer.weight.detach().T
            return x @ self.weight + self.layer(x)

    networks = [Kept() for _ in range(2)]
    torch.testing.assert_close(DeepEnsemble(networks)(vectors(4)), outputs_of(networks, vectors(4)))


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
