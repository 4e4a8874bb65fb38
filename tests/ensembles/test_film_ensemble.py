"""FiLM-Ensemble: shared and owned parameters, the three starts, and networks without norms."""

import math

import pytest
import torch
from torch import nn

import enfold
from clouds import three_clouds
from enfold.cost import parameters
from enfold.ensembles.film_ensemble import FiLMEnsemble
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet, ViT
from enfold.train import TrainConfig
from fitting import any_network, fitted


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def test_members_are_the_network_with_their_own_norms():
    network, inputs = small().eval(), torch.randn(5, 4)
    members = FiLMEnsemble(network, 3).eval()
    scale, shift = members.own.state()["1.weight"], members.own.state()["1.bias"]
    hidden = network[0](inputs)
    normal = (hidden - network[1].running_mean) / (network[1].running_var + network[1].eps).sqrt()
    expected = torch.stack([network[3](torch.relu(scale[m] * normal + shift[m])) for m in range(3)])
    torch.testing.assert_close(members(inputs), expected, rtol=1e-4, atol=1e-5)


def test_all_weights_are_shared():
    members = FiLMEnsemble(ResNet(width=4, depth=8), 3)
    stored = members.shared.state()
    norms = {name for name, tensor in members.expand().items() if name not in stored}
    assert norms == set(members.own.state())
    assert norms
    for name, tensor in stored.items():
        assert members.expand()[name].data_ptr() == tensor.data_ptr()
        assert members.expand()[name].stride(0) == 0
    assert "head.weight" in stored


def test_the_number_of_parameters_grows_by_the_norms_only():
    network = ResNet(width=8, depth=8)
    affine = sum(p.numel() for m in network.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert parameters(FiLMEnsemble(network, 4)) == parameters(network) + 3 * affine


def test_statistics_are_each_members_own():
    torch.manual_seed(0)
    members = FiLMEnsemble(small(), 2).train()
    inputs = torch.randn(2, 8, 4)
    inputs[1] += 5
    members.forward_each(inputs)
    means = members.own.state()["1.running_mean"]
    assert not torch.allclose(means[0], means[1], atol=0.05)


def test_starts():
    network = small()
    nn.init.uniform_(network[1].weight, 0.5, 2)
    own = FiLMEnsemble(network, 4, gain=3.0).own.state()
    bound = 3 * math.sqrt(6 / 17)
    for name in ("1.weight", "1.bias"):
        assert own[name].abs().max() <= bound
        assert own[name].abs().max() > 0.8 * bound
    signs = FiLMEnsemble(network, 4, init="signs", gain=0.5).own.state()["1.weight"]
    assert set(signs.unique().tolist()) == {-0.5, 0.5}
    around = FiLMEnsemble(network, 4, init="around", gain=0.0)
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(around.eval()(inputs), network.eval()(inputs).expand(4, 5, 3))


def test_the_gain_sets_the_initial_distance_of_members():
    torch.manual_seed(0)
    network, inputs = small().eval(), torch.randn(32, 4)
    starts = [FiLMEnsemble(network, 4, init="around", gain=gain) for gain in (0.05, 0.2, 0.8)]
    spreads = [float(members(inputs).detach().std(0).mean()) for members in starts]
    assert spreads == sorted(spreads)
    assert spreads[0] > 0


def test_layer_norms_and_group_norms_are_modulated():
    vit = FiLMEnsemble(ViT((3, 8, 8), 4, width=8, depth=1, heads=2), 2)
    assert {"norm.weight", "blocks.0.norm1.bias"} <= set(vit.own.state())
    grouped = FiLMEnsemble(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.RMSNorm(4)), 2)
    assert set(grouped.own.state()) == {"1.weight", "1.bias", "2.weight"}


def test_a_network_without_norms_is_refused_with_a_remedy():
    with pytest.raises(EnfoldError, match=r"norm layers with affine parameters.* MLP has none: add norm layers"):
        FiLMEnsemble(MLP(4, [8], 3), 2)
    with pytest.raises(EnfoldError, match="has none"):
        FiLMEnsemble(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False)), 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gain": -1}, r"gain .*got -1"),
        ({"init": "zeros"}, "got 'zeros'"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        FiLMEnsemble(any_network(), **settings)


def test_trained_members_learn_and_are_stored(tmp_path):
    torch.manual_seed(0)
    data, network = three_clouds(96, 48, 8), small()
    trained = fitted(FiLMEnsemble(network, 3), data, TrainConfig(epochs=6, batch_size=16, lr=0.02))
    loaded = enfold.load(enfold.save(trained, tmp_path / "members.safetensors"), network)
    torch.testing.assert_close(loaded(data.test.inputs), trained(data.test.inputs), rtol=0, atol=0)
    right = trained(data.train.inputs).argmax(-1) == data.train.labels
    assert right.float().mean() > 0.6
