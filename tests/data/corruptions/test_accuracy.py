"""A trained network gets worse on corrupted images."""

import pytest
import torch
from torch import nn

from enfold.data import corrupt_split, load
from enfold.data.corruptions import KINDS
from enfold.evaluate import predict
from enfold.train import TrainConfig, fit

IMAGES = 2000
NOISE = 1.64  # standard errors: one in twenty falls of nothing is larger
QUICK = {"gaussian_noise", "defocus_blur", "fog", "contrast", "elastic_transform"}  # one of each group; others are slow
WEAK = {"gaussian_noise", "shot_noise", "speckle_noise", "jpeg_compression", "spatter"}  # hardly matter to clothes


@pytest.fixture(scope="module")
def clothes_data():
    data = load("fashion-mini")
    return data.replace(test=data.test[:IMAGES])


@pytest.fixture(scope="module")
def trained(clothes_data):
    """A tiny network after half a second, right about 83 % of clean images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    few = clothes_data.replace(train=clothes_data.train[:3000])
    fit(network, few, config=TrainConfig(epochs=6, batch_size=64, lr=5e-3, select="last"), quiet=True)
    return network


def right(network, data):
    said = predict(network, data.test)
    return (said.log_probs[0].argmax(1) == said.labels).double()


@pytest.fixture(scope="module")
def clean(trained, clothes_data):
    return right(trained, clothes_data)


def fall(before, after):
    """How much accuracy falls on the same images, in standard errors of the fall."""
    change = before - after
    return (change.mean() / (change.std() / len(change) ** 0.5)).item()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in KINDS if kind != "saturate"],
)
def test_accuracy_falls(trained, clothes_data, clean, kind):
    """Of three seeds the least fall is 2.4 from clean, 2.6 from severity 1, and -0.9 of the weak kinds."""
    mild, severe = (
        right(trained, clothes_data.replace(test=corrupt_split(clothes_data, kind, severity))) for severity in (1, 5)
    )
    assert clean.mean() > 0.8
    if kind in WEAK:
        assert min(fall(clean, severe), fall(mild, severe)) > -NOISE
        return
    assert fall(clean, severe) > NOISE
    if kind == "elastic_transform":  # its affine map is published as 8 % of the image at severity 1 and 3 % at 5
        assert fall(severe, mild) > NOISE
    else:
        assert fall(mild, severe) > NOISE


def test_grey_images_have_no_colour_to_saturate(trained, clothes_data, clean):
    assert torch.equal(right(trained, clothes_data.replace(test=corrupt_split(clothes_data, "saturate", 5))), clean)
