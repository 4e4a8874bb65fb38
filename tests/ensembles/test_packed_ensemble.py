"""Packed-Ensembles: grouped layers against small networks, numbers of parameters, and refused arguments."""

from functools import partial

import pytest
import torch
from torch import nn

import enfold
from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.ensembles.packed_ensemble import PackedEnsemble
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet, WideResNet
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted
from zoo import Apply

CONTRACT = {"members_together": True}


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@pytest.mark.parametrize("gamma", [1, 2])
def test_it_is_one_grouped_network(gamma):
    torch.manual_seed(0)
    members, alpha = 4, 2
    packed = PackedEnsemble(cnn(), members, alpha=alpha, gamma=gamma).train()
    packed(torch.randn(16, 3, 9, 9))  # so that batch-norm statistics differ
    packed.eval()
    one = nn.Sequential(
        nn.Conv2d(3, 8 * alpha, 3, padding=1), nn.BatchNorm2d(8 * alpha), nn.ReLU(),
        nn.Conv2d(8 * alpha, 16 * alpha, 3, stride=2, groups=members * gamma), nn.BatchNorm2d(16 * alpha), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(16 * alpha, members * 5, 1, groups=members), nn.Flatten(),
    ).eval()  # fmt: skip
    state = packed.expand()
    names = {"0": "0", "1": "1", "3": "3", "4": "4", "8": "7"}  # the head is a grouped 1x1 convolution
    for ours, theirs in names.items():
        for key, tensor in one[int(theirs)].state_dict().items():
            if key != "num_batches_tracked":
                value = state[f"{ours}.{key}"].flatten(0, 1)  # member-major channels
                tensor.copy_(value.view(tensor.shape).detach())
    inputs = torch.randn(6, 3, 9, 9)
    expected = one(inputs).view(6, members, 5).transpose(0, 1)
    torch.testing.assert_close(packed(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_it_equals_separate_small_networks_in_training():
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 6), torch.randint(3, (40,))
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (6,))
    packed = PackedEnsemble(MLP(6, [9, 12], 3), 3, engine="loop")
    alone = packed.networks()
    plan = TrainConfig(epochs=2, batch_size=16)
    fit(packed, data, config=plan, quiet=True)
    for index, network in enumerate(alone):
        assert isinstance(network, MLP)
        assert [layer.out_features for layer in network.hidden] == [6, 8]
        fit(network, data, config=plan.replace(first_member=index), quiet=True)
        torch.testing.assert_close(packed.member(index).state_dict(), network.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("members", "alpha", "gamma"), [(4, 2, 1), (4, 2, 2), (2, 2, 2), (4, 4, 1), (1, 2, 1)])
def test_the_count_is_equation_3(members, alpha, gamma):
    network = WideResNet(10, 2, 10)
    packed = PackedEnsemble(network, members, alpha=alpha, gamma=gamma)
    assert parameters(packed) / parameters(network) == pytest.approx(alpha**2 / (members * gamma), rel=0.1)


def test_one_member_of_the_same_width_is_a_fresh_network_like_the_source():
    network = ResNet(width=8, depth=8)
    packed = PackedEnsemble(network, 1, alpha=1)
    assert {name: tensor.shape for name, tensor in packed.member(0).state_dict().items()} == {
        name: tensor.shape for name, tensor in network.state_dict().items()
    }
    assert not torch.equal(packed.member(0).conv.weight, network.conv.weight)


def test_members_are_initialised_with_different_seeds():
    network = MLP(6, [8], 3)
    inputs = torch.randn(5, 6)
    first, again, other = (PackedEnsemble(network, 4, seed=seed)(inputs) for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first[0], first[1])


def test_saved_after_training_and_loaded(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 6), torch.randint(3, (40,))
    data = Data(Split(inputs, labels), Split(inputs, labels), Split(inputs, labels), 3, (6,))
    network, build = MLP(6, [8, 8], 3), partial(PackedEnsemble, num_members=4, alpha=1.5, gamma=2, seed=3)
    packed = fitted(build(network), data, TrainConfig(epochs=2, batch_size=16))
    path = enfold.save(packed, tmp_path / "packed.safetensors")
    loaded = enfold.load(path, network)
    torch.testing.assert_close(loaded(inputs), packed(inputs), rtol=0, atol=0)
    assert loaded.options() == packed.options()
    assert build.keywords.items() <= loaded.options().items()
    assert loaded.seeds == packed.seeds


def test_invalid_options_and_networks_are_refused():
    with pytest.raises(EnfoldError, match=r"alpha .*got 0"):
        PackedEnsemble(any_network(), alpha=0)
    with pytest.raises(EnfoldError, match=r"gamma .*got 0"):
        PackedEnsemble(any_network(), gamma=0)
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        PackedEnsemble(any_network(), 0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(EnfoldError, match=r"'2\.weight' is tied"):
        PackedEnsemble(tied)
    with pytest.raises(EnfoldError, match=r"got '0' \(LSTM\)"):
        PackedEnsemble(nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize(("members", "alpha"), [(4, 2.0), (2, 4.0)])
def test_a_parameter_as_long_as_a_hidden_width_is_refused(members, alpha):
    """Its first axis is the tokens, of which there happen to be as many as hidden units."""
    network = Apply(lambda net, x: net.b((net.a(x).transpose(1, 2) @ net.mix).mean(2)), a=nn.Linear(6, 8),
                    b=nn.Linear(8, 4), mix=nn.Parameter(torch.randn(8, 3)))  # fmt: skip
    inputs = torch.randn(3, 8, 6)
    assert network(inputs).shape == (3, 4)
    with pytest.raises(
        EnfoldError, match=rf"with {alpha / members:.3g} of its .* inputs of shape \(3, 8, 6\) .*: check"
    ):
        PackedEnsemble(network, members, alpha=alpha)(inputs)
