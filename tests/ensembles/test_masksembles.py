"""Masksembles: masks on layers written out, their counts and overlap, and what cannot be masked."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold.cost import parameters
from enfold.ensembles.masksembles import Masksembles
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet
from enfold.train import TrainConfig
from fitting import any_network, fitted


def test_a_hidden_layer_sees_masked_features():
    network, inputs = MLP(6, [12], 3), torch.randn(5, 6)
    members = Masksembles(network, 3)
    hidden = F.relu(network.hidden[0](inputs))
    kept = members.mask_tree.state()["head.mask"]
    assert kept.dtype == torch.bool
    expected = torch.stack([network.head(hidden * mask) for mask in kept])
    torch.testing.assert_close(members(inputs), expected)
    assert [name for name, _ in members.mask_tree.named_buffers()] == ["head.mask"]  # not the first layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(8, 3), (8,)),
        (nn.Conv1d(8, 6, 3, stride=2), (8, 9)),
        (nn.Conv2d(8, 6, 3, groups=2, padding=1), (8, 6, 6)),
        (nn.Conv2d(8, 8, 3, groups=8), (8, 6, 6)),
        (nn.ConvTranspose2d(8, 6, 3, groups=2), (8, 5, 5)),
    ],
)
def test_all_taps_of_an_input_channel_are_masked_together(layer, shape):
    members = Masksembles(layer, 3)
    inputs = torch.randn(2, *shape)
    masks = members.mask_tree.state()["mask"].view(3, 1, -1, *(1,) * (len(shape) - 1))
    expected = torch.stack([layer(inputs * mask) for mask in masks])
    torch.testing.assert_close(members(inputs), expected, rtol=1e-4, atol=1e-5)


@given(scale=st.floats(1, 6), features=st.integers(4, 60), size=st.integers(1, 5), joint=st.booleans())
def test_every_mask_has_as_many_ones_and_joint_ones_use_all_features(scale, features, size, joint):
    masks = Masksembles(nn.Linear(features, 2), size, scale=scale, masks="joint" if joint else "independent")
    kept = masks.mask_tree.state()["mask"]
    assert kept.shape == (size, features)
    ones = kept.sum(1)
    assert (ones == ones[0]).all()
    assert ones[0] >= 1
    if joint:
        assert kept.any(0).all()
    else:
        assert ones[0] == max(1, round(features / scale))


@pytest.mark.parametrize("drawn", ["independent", "joint"])
@pytest.mark.parametrize("scale", [1.5, 2.0, 4.0])
def test_the_expected_overlap_is_equation_4(drawn, scale):
    build = partial(Masksembles, num_members=4, scale=scale, masks=drawn)
    kept = [build(nn.Linear(60, 2), seed=seed).mask_tree.state()["mask"] for seed in range(30)]
    pairs = [(a & b).sum() / a.sum() for masks in kept for a, b in itertools.combinations(masks, 2)]
    assert abs(float(torch.stack(pairs).mean()) - 1 / scale) < 0.05


@pytest.mark.parametrize("drawn", ["independent", "joint"])
def test_scale_1_is_the_source_network(drawn):
    network, inputs = ResNet(width=8, depth=8), torch.randn(4, 3, 8, 8)
    members = Masksembles(network, 3, scale=1.0, masks=drawn).eval()
    torch.testing.assert_close(members(inputs), network.eval()(inputs).expand(3, 4, 10), rtol=1e-4, atol=1e-5)


def test_masks_cost_no_parameters_and_depend_on_the_seed():
    network = MLP(6, [16, 16], 3)
    assert parameters(Masksembles(network, 4)) == parameters(network)
    one, other = (Masksembles(network, 4, seed=seed).mask_tree.state()["head.mask"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_narrow_layers_are_not_masked_and_reported():
    members = Masksembles(MLP(6, [12, 8], 3), 2, min_features=10)
    assert members.unmasked == ("head",)
    assert set(members.mask_tree.state()) == {"hidden.1.mask"}
    with pytest.raises(EnfoldError, match=r"min_features=10 .*widest has 8"):
        Masksembles(MLP(6, [8, 8], 3), 2, min_features=10)


def test_patterns_choose_layers():
    network = MLP(6, [12, 12], 3)
    assert set(Masksembles(network, 2, include=(r"hidden\.0",)).mask_tree.state()) == {"hidden.0.mask"}
    assert set(Masksembles(network, 2, exclude=("head",)).mask_tree.state()) == {"hidden.1.mask"}
    with pytest.raises(EnfoldError, match=r"exclude .*got exclude=\('head'"):
        Masksembles(network, 2, exclude=("head", r"hidden\.1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0.5}, r"scale .*got 0\.5"),
        ({"scale": 7}, r"scale .*got 7"),
        ({"min_features": 0}, r"min_features .*got 0"),
        ({"masks": "both"}, "got 'both'"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        Masksembles(any_network(), **settings)


def test_batch_norms_may_be_each_members_own():
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    assert Masksembles(network, 2, batch_norm="own").own.state()["1.running_mean"].shape == (2, 6)
    assert Masksembles(network, 2).shared.state()["1.weight"].shape == (6,)


def test_trained_members_learn_and_are_stored(tmp_path):
    torch.manual_seed(0)
    data, network = three_clouds(96, 48, 8), MLP(4, [16, 16], 3)
    plan = TrainConfig(epochs=6, batch_size=16, lr=0.02, order="split")
    members = partial(Masksembles, num_members=3)
    trained = fitted(members(network), data, plan)
    loaded = enfold.load(enfold.save(trained, tmp_path / "members.safetensors"), network)
    torch.testing.assert_close(loaded(data.test.inputs), trained(data.test.inputs), rtol=0, atol=0)
    right = trained(data.train.inputs).argmax(-1) == data.train.labels
    assert right.float().mean() > 0.6
