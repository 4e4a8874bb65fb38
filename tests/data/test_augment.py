import pytest
import torch

from enfold.data.augment import AUGMENTATIONS, augmentation, flip, inception_crop, pad_crop
from enfold.errors import EnfoldError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(batch=64, dtype=torch.float32):
    """Every pixel of one image is different and none is 0."""
    return (torch.arange(1, 8 * 8 + 1).view(1, 1, 8, 8) + torch.zeros(batch, 3, 1, 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_pad_crop_equals_cropping_one_at_a_time(dtype, padding):
    batch = images(dtype=dtype)
    offsets = torch.randint(0, 2 * padding + 1, (2, len(batch)), generator=seeded())
    padded = torch.zeros(len(batch), 3, 8 + 2 * padding, 8 + 2 * padding, dtype=dtype)
    padded[:, :, padding : padding + 8, padding : padding + 8] = batch
    expected = [
        padded[index, :, top : top + 8, left : left + 8] for index, (top, left) in enumerate(offsets.T.tolist())
    ]
    torch.testing.assert_close(pad_crop(batch, seeded(), padding), torch.stack(expected), rtol=0, atol=0)


def test_pad_crop_uses_every_offset_about_equally_and_independently():
    numbered = torch.arange(81.0).view(1, 1, 9, 9).expand(8100, 1, 9, 9)
    shifted = pad_crop(numbered, seeded(), padding=4)
    # With 9 x 9 pixels the one in the middle always comes from inside the image, and its value says from where.
    counts = torch.bincount(shifted[:, 0, 4, 4].long(), minlength=81)
    assert len(counts) == 81
    assert 55 < counts.min() <= counts.max() < 145  # 100 ± 10 for each of the 9 x 9 offsets


def test_pad_crop_does_not_modify_its_input():
    batch = images()
    before = batch.clone()
    shifted = pad_crop(batch, seeded())
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    shifted.zero_()
    torch.testing.assert_close(batch, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_mirrors_about_half_of_the_images(dtype):
    batch = images(batch=1000, dtype=dtype)
    flipped = flip(batch, seeded())
    mirrored = (flipped == batch.flip(-1)).flatten(1).all(1)
    kept = (flipped == batch).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 430 < mirrored.sum() < 570  # 500 ± 16
    assert flipped.dtype == dtype


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
def test_the_generator_decides(name):
    batch = images()
    apply = AUGMENTATIONS[name]
    torch.testing.assert_close(apply(batch, seeded(1)), apply(batch, seeded(1)), rtol=0, atol=0)
    assert not torch.equal(apply(batch, seeded(1)), apply(batch, seeded(2)))
    assert apply(batch, seeded()).shape == batch.shape


def test_augmentation_applies_in_the_given_order_with_one_generator():
    batch, generator = images(), seeded(5)
    expected = flip(pad_crop(batch, generator), generator)
    torch.testing.assert_close(augmentation(["pad-crop", "flip"])(batch, seeded(5)), expected, rtol=0, atol=0)


def test_no_augmentation_is_the_identity():
    batch = images()
    assert augmentation([])(batch, seeded()) is batch


def test_an_unknown_name_lists_the_known():
    with pytest.raises(EnfoldError, match=r"augment .*'cutout'"):
        augmentation(["flip", "cutout"])


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
def test_refuses_inputs_other_than_images(name):
    with pytest.raises(EnfoldError, match=r"augment .*\(4, 10\)"):
        AUGMENTATIONS[name](torch.zeros(4, 10), seeded())


def test_inception_crops_are_parts_of_the_image_with_area_and_ratio_in_their_ranges():
    height, width, count = 40, 60, 400
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    images = torch.stack([rows, columns]).expand(count, -1, -1, -1)
    found = inception_crop(images, torch.Generator().manual_seed(0))
    assert found.shape == images.shape
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    # Slopes of the coordinates give the size of a crop; interpolation at the border lowers them a little.
    down = (found[:, 0, -5, 30] - found[:, 0, 4, 30]) * (height - 1) / (height - 9) * height
    across = (found[:, 1, 20, -5] - found[:, 1, 20, 4]) * (width - 1) / (width - 9) * width
    area, ratio = down * across / (height * width), across / down
    assert 0.06 < float(area.min()) < 0.15
    assert 0.75 < float(area.max()) < 1.1
    assert 0.65 < float(ratio.min()) < 0.85
    assert 1.2 < float(ratio.max()) < 1.5
    assert 0.4 < float(area.mean()) < 0.6
    assert float(area.std()) > 0.15  # uniform, not constant
    torch.testing.assert_close(found, inception_crop(images, torch.Generator().manual_seed(0)))


def test_an_inception_crop_that_never_fits_is_the_complete_image():
    images = torch.rand(3, 2, 1, 64)  # no crop of this ratio fits
    torch.testing.assert_close(inception_crop(images, torch.Generator().manual_seed(0)), images, rtol=1e-4, atol=1e-4)
