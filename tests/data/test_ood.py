"""OOD sets: size, channels and type are converted by known rules with a description; noise; excluded classes."""

import numpy as np
import pytest
import torch

from enfold.data import Data, Split, load
from enfold.data.dataset import some
from enfold.data.ood import Outside, adapt, noise, of_classes, outside
from enfold.errors import EnfoldError


def images(shape, N=6, dtype=torch.uint8, seed=0):
    values = torch.randint(0, 256, (N, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return values if dtype == torch.uint8 else values.float() / 255


def data(shape, dtype=torch.uint8, normalised=True):
    split = Split(images(shape, dtype=dtype), torch.arange(6) % 3)
    mean, std = ((0.5,) * shape[0], (0.2,) * shape[0]) if normalised else (None, None)
    return Data(split, split, split, 3, shape, mean=mean, std=std)


def test_sets_of_the_same_form_are_unchanged():
    given = images((3, 8, 8), seed=1)
    adapted, description = adapt(given, data((3, 8, 8)))
    assert torch.equal(adapted, given)
    assert description == "normalised with the statistics of the training data"


def test_grey_images_are_converted_to_colour_and_resized():
    flat = torch.full((2, 1, 28, 28), 100, dtype=torch.uint8)
    adapted, description = adapt(flat, data((3, 32, 32)))
    assert adapted.shape == (2, 3, 32, 32)
    assert adapted.dtype == torch.uint8
    assert adapted.unique().tolist() == [100]
    assert description.startswith("resized from 28 x 28 to 32 x 32 by bilinear interpolation; grey converted to colour")


def test_colour_images_are_converted_to_grey_by_luma():
    red = torch.zeros(1, 3, 8, 8)
    red[:, 0] = 1
    adapted, description = adapt(red, data((1, 8, 8), torch.float32))
    torch.testing.assert_close(adapted, torch.full((1, 1, 8, 8), 0.299))
    assert "colour converted to grey, weighted by 0.299, 0.587, 0.114" in description


def test_bytes_and_floats_are_converted():
    adapted, _ = adapt(images((1, 8, 8)), data((1, 8, 8), torch.float32))
    torch.testing.assert_close(adapted, images((1, 8, 8), dtype=torch.float32))
    adapted, _ = adapt(images((1, 8, 8), dtype=torch.float32), data((1, 8, 8)))
    assert torch.equal(adapted, images((1, 8, 8)))


def test_shrinking_averages_and_other_aspect_ratios_give_a_note():
    checks = (torch.arange(32)[:, None] + torch.arange(16)) % 2 * 1.0
    adapted, description = adapt(checks.expand(1, 1, 32, 16), data((1, 8, 8), torch.float32))
    assert (adapted[..., 2:6, 2:6] - 0.5).abs().max() < 0.1  # not every fourth pixel, which would be all 0
    assert "32 x 16 to 8 x 8" in description
    assert "aspect ratio" in description


def test_a_set_has_a_name_and_can_be_sliced():
    made = outside(Split(images((1, 5, 5)), torch.arange(6)), data((1, 8, 8)), "tiny", 4)
    assert isinstance(made[:2], Outside)
    assert (len(made), len(made[:2]), made[:2].name) == (4, 2, "tiny")
    assert "tiny: 4 inputs of shape (1, 8, 8); resized from 5 x 5" in repr(made)


def test_subsets_of_a_set_are_representative():
    """The first, unless they lack a class that the others have, as where images come class by class."""
    mixed, by_class = torch.arange(60) % 3, torch.arange(60) // 20
    assert torch.arange(60)[some(mixed, 6)].tolist() == [0, 1, 2, 3, 4, 5]
    assert by_class[some(by_class, 6)].tolist() == [0, 0, 1, 1, 2, 2]
    assert len(by_class[some(by_class, 2)]) == 2  # too few for every class
    assert some(by_class, None) == some(by_class, 60) == slice(None)
    made = outside(
        Split(torch.arange(60, dtype=torch.uint8)[:, None, None, None].expand(60, 1, 8, 8), by_class),
        data((1, 8, 8)),
        "sorted",
        3,
    )
    assert made.labels.tolist() == [0, 1, 2]
    assert made.inputs[:, 0, 0, 0].tolist() == [0, 20, 40]


def test_noise_has_the_documented_values():
    uniform = noise("uniform", data((1, 16, 16)), 200)
    values = uniform.inputs.double() / 255
    assert uniform.inputs.dtype == torch.uint8
    assert (values.mean().item(), values.var().item()) == pytest.approx((0.5, 1 / 12), rel=0.02)
    normal = noise("gaussian", data((3, 16, 16), torch.float32), 100)
    assert (normal.inputs.mean().item(), normal.inputs.std().item()) == pytest.approx((0.5, 0.2), rel=0.03)
    assert normal.inputs.min() >= 0
    assert torch.equal(noise("gaussian", data((3, 16, 16), torch.float32), 100).inputs, normal.inputs)
    other = noise("gaussian", data((3, 16, 16), torch.float32), 100, seed=1)
    assert not torch.equal(other.inputs, normal.inputs)
    assert noise("gaussian", data((1, 8, 8), normalised=False), 3).inputs.dtype == torch.uint8


@pytest.mark.parametrize(
    ("given", "into", "message"),
    [
        (images((2, 8, 8)), data((1, 8, 8)), r"images .*\(6, 2, 8, 8\)"),
        (torch.zeros(4, 5), data((1, 8, 8)), r"got \(4, 5\)"),
        (3 * torch.ones(2, 1, 8, 8), data((1, 8, 8)), "images .*from 3 to 3"),
        (torch.full((2, 1, 8, 8), np.nan), data((1, 8, 8)), "images must"),
        (torch.ones(2, 1, 8, 8, dtype=torch.int64), data((1, 8, 8)), "got torch.int64"),
        (images((1, 8, 8)), data((20,), normalised=False), r"data .*\(20,\)"),
    ],
)
def test_what_cannot_be_adapted_is_refused(given, into, message):
    with pytest.raises(EnfoldError, match=message):
        adapt(given, into)


def test_data_other_than_raw_pixels_are_refused():
    split = Split(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)
    with pytest.raises(EnfoldError, match="raw pixels"):
        noise("uniform", Data(split, split, split, 3, (1, 8, 8)), 3)
    with pytest.raises(EnfoldError, match=r"data.test .*list"):
        noise("uniform", Data(split, split, [], 3, (1, 8, 8)), 3)
    with pytest.raises(EnfoldError, match=r"kind .*'white'"):
        noise("white", data((1, 8, 8)), 3)


@pytest.fixture
def four_classes(tmp_path):
    labels = np.arange(80) % 4
    inputs = (labels[:, None, None, None] * 50 + np.arange(80)[:, None, None, None] // 20).astype(np.uint8)
    inputs = np.broadcast_to(inputs, (80, 1, 4, 4))
    path = tmp_path / "four.npz"
    np.savez(path, x_train=inputs[:60], y_train=labels[:60], x_test=inputs[60:], y_test=labels[60:])
    return path


def test_excluded_classes_are_removed_and_the_others_renumbered(four_classes):
    whole, some = load(four_classes, val_size=12), load(four_classes, val_size=12, exclude_classes=[1])
    assert some.num_classes == 3
    assert len(some.val) == 12
    for part in (some.train, some.val, some.test):
        shown = part.inputs[:, 0, 0, 0] // 50  # the class in the source
        assert part.labels.unique().tolist() == [0, 1, 2]
        assert torch.equal(torch.tensor([0, 2, 3])[part.labels], shown.long())
    assert len(some.test) + len(of_classes(whole.test, [1])) == len(whole.test)
    assert some.mean != whole.mean  # measured on what is learnt from


def test_unknown_classes_are_refused(four_classes):
    with pytest.raises(EnfoldError, match=r"exclude_classes .*got 4"):
        load(four_classes, exclude_classes=[4])
    with pytest.raises(EnfoldError, match=r"exclude_classes .*got 1"):
        load(four_classes, exclude_classes=[0, 1, 2])
