import colorsys
import io

import numpy as np
import pytest
import torch
from scipy import ndimage

from enfold.data.corruptions import corrupt
from enfold.data.corruptions.digital import _affine
from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.jpeg import _dct, _quantize, _table, compress
from enfold.data.corruptions.linear import box_matrix, positions, sample


def by_hsv(image, change):
    """Each pixel of (3, H, W) through the standard library's HSV."""
    flat = image.double().flatten(1).T.tolist()
    changed = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in flat]
    return torch.tensor(changed).T.reshape(image.shape).float()


@pytest.fixture
def colours():
    """Random colours, with black, white and grey among them: (1, 3, 8, 8)."""
    colours = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    colours[..., 0, 0], colours[..., 0, 1], colours[..., 0, 2] = 0, 1, 0.4
    colours[:, 0, 0, 3] = 0
    return colours


@pytest.mark.parametrize(("severity", "c"), [*enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1)])
def test_brightness_is_hsvs_value(colours, severity, c):
    expected = by_hsv(colours[0], lambda h, s, v: (h, s, min(v + c, 1)))
    torch.testing.assert_close(corrupt(colours, "brightness", severity)[0], expected, atol=1e-5, rtol=0)
    grey = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    torch.testing.assert_close(corrupt(grey, "brightness", severity), (grey + c).clamp(max=1))


@pytest.mark.parametrize(("severity", "c"), [*enumerate(((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)), 1)])
def test_saturate_is_hsvs_saturation(colours, severity, c):
    expected = by_hsv(colours[0], lambda h, s, v: (h, min(s * c[0] + c[1], 1), v))
    torch.testing.assert_close(corrupt(colours, "saturate", severity)[0], expected, atol=1e-5, rtol=0)
    grey = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    assert torch.equal(corrupt(grey, "saturate", severity), grey)


@pytest.mark.parametrize(("severity", "c"), [*enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1)])
def test_contrast(scenes, severity, c):
    mean = scenes.mean((2, 3), keepdim=True)
    result = corrupt(scenes, "contrast", severity)
    torch.testing.assert_close(result, (scenes - mean) * c + mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mean((2, 3)), scenes.mean((2, 3)))


def test_pixelate_by_hand():
    """32 pixels become int(32 x 0.75) = 24 blocks of 1, 2, 1, 1, 2, 1, ... pixels."""
    image = torch.zeros(1, 1, 32, 32)
    image[..., 1] = 0.6
    image[..., 2] = 1
    result = corrupt(image, "pixelate", 4)[0, 0, 0]
    sizes = (box_matrix(32, 24) > 0).sum(1)
    assert sizes.tolist()[:8] == [1, 2, 2, 1, 1, 2, 2, 1]
    torch.testing.assert_close(result[:5], torch.tensor([0, 0.8, 0.8, 0, 0]))


def test_pixelate_makes_block_means():
    image = torch.arange(64.0).div(64).view(1, 1, 8, 8)
    halves = box_matrix(8, 4)
    means = torch.nn.functional.avg_pool2d(image, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(halves @ image @ halves.T, means)


@pytest.mark.parametrize("size", [(32, 32), (28, 28), (48, 64)])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_pixelate_is_pillows(size, severity):
    pillow = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(severity).integers(0, 256, size, dtype=np.uint8)
    height, width = size
    share = (95, 90, 85, 75, 65)[severity - 1]
    small = pillow.fromarray(image).resize((width * share // 100, height * share // 100), pillow.Resampling.BOX)
    expected = np.asarray(small.resize((width, height), pillow.Resampling.BOX), dtype=int)
    result = corrupt(torch.from_numpy(image)[None, None], "pixelate", severity)[0, 0].numpy()
    assert np.abs(result - expected).max() <= 1  # Pillow rounds between rows and columns


def test_elastic_sampling_is_scipys(scenes):
    image = scenes[:1, :1, :, :20]
    generator = torch.Generator().manual_seed(0)
    x, y = positions(image)
    x, y = (axis + 12 * torch.rand(1, 32, 20, generator=generator) - 6 for axis in (x, y))
    for repeat_edge, mode in ((True, "reflect"), (False, "mirror")):
        places = np.stack([y[0].numpy(), x[0].numpy()])
        expected = ndimage.map_coordinates(image[0, 0].numpy(), places, order=1, mode=mode)
        result = sample(image, x, y, repeat_edge=repeat_edge)[0, 0]
        torch.testing.assert_close(result, torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_elastic_moves_three_points_to_where_they_were_drawn():
    images = torch.zeros(5, 1, 32, 32)
    points = torch.tensor([[26.0, 26], [26, 6], [6, 6]])
    moved = points + 2.5 * Draws(0, "t", torch.arange(5)).draw_signed(3, 2)
    x, y = _affine(images, moved[..., :1], moved[..., 1:], 2.5, Draws(0, "t", torch.arange(5)))
    torch.testing.assert_close(torch.cat([x, y], 2), points.expand(5, 3, 2), atol=1e-4, rtol=0)


def test_elastic_without_a_field_is_affine():
    ramp = torch.arange(32.0).div(64).add(0.25).expand(3, 1, 32, 32)
    inside = corrupt(ramp, "elastic_transform", 1)[..., 8:24, 8:24]
    assert inside.diff(n=2, dim=3).abs().max() < 1e-5
    bent = corrupt(ramp, "elastic_transform", 5)[..., 8:24, 8:24]
    assert bent.diff(n=2, dim=3).abs().max() > 1e-3


def by_pillow(pillow, image, quality):
    buffer = io.BytesIO()
    pillow.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(pillow.open(buffer), dtype=float)


@pytest.mark.parametrize("size", [(32, 32), (27, 30), (48, 20)])
@pytest.mark.parametrize("quality", [20, 40, 50, 80])
def test_jpeg_is_pillows(scenes, size, quality):
    """Equal up to the integer DCT of libjpeg, which sometimes rounds a coefficient the other way."""
    pillow = pytest.importorskip("PIL.Image")
    images = torch.nn.functional.interpolate(scenes[:12], size, mode="bilinear").mul(255).round().byte()
    colour = compress(images / 255, quality).mul(255).permute(0, 2, 3, 1).numpy()
    expected = np.stack([by_pillow(pillow, image.permute(1, 2, 0).numpy(), quality) for image in images])
    assert np.abs(colour - expected).mean() < 0.45
    assert np.abs(colour - expected).mean() < 0.12 * np.abs(images.permute(0, 2, 3, 1).numpy() - expected).mean()
    grey = compress(images[:, :1] / 255, quality).mul(255)[:, 0].numpy()
    expected = np.stack([by_pillow(pillow, image[0].numpy(), quality) for image in images])
    assert np.abs(grey - expected).mean() < 0.3


def test_jpeg_tables_of_libjpeg():
    base = (16, 11, 255, 1)
    assert _table(base, 50).tolist() == [16, 11, 255, 1]
    assert _table(base, 80).tolist() == [6, 4, 102, 1]
    assert _table(base, 25).tolist() == [32, 22, 255, 2]
    assert _table(base, 100).tolist() == [1, 1, 1, 1]


def test_jpeg_transform_is_orthogonal_and_its_first_row_the_mean():
    torch.testing.assert_close(_dct() @ _dct().T, torch.eye(64), atol=1e-6, rtol=0)
    torch.testing.assert_close(_dct()[0], torch.full((64,), 1 / 8))


def test_jpeg_block_by_hand():
    """A plain block of level 128 + 21 has the coefficient 8 x 21 = 168 and, quantised by 16, 10.5 -> 11: level 150."""
    table = torch.full((64,), 16.0)
    assert _quantize(torch.full((1, 1, 8, 8), 149.0), table).unique().tolist() == [150.0]
    assert _quantize(torch.full((1, 1, 8, 8), 107.0), table).unique().tolist() == [106.0]
