import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from enfold.data.corruptions import corrupt
from enfold.data.corruptions.blur import _scatter_pixels, blur_along_line
from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.linear import gaussian, zoom_matrix

BLURS = ("gaussian_blur", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur")


@pytest.mark.parametrize("kind", BLURS)
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_a_plain_image_stays_plain(kind, severity):
    plain = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1).expand(2, 3, 32, 24)
    torch.testing.assert_close(corrupt(plain, kind, severity), plain.contiguous(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("severity", "sigma"), [*enumerate((0.4, 0.6, 0.7, 0.8, 1.0), 1)])
def test_gaussian_blur_is_scipys(scenes, severity, sigma):
    expected = ndimage.gaussian_filter(scenes[:3].numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
    torch.testing.assert_close(corrupt(scenes[:3], "gaussian_blur", severity), torch.from_numpy(expected))


def test_mirrored_gaussian_is_scipys(scenes):
    images = scenes[:2, :, :9, :12]
    expected = ndimage.gaussian_filter(images.numpy(), (0, 0, 6.4, 6.4), mode="reflect", truncate=3)
    torch.testing.assert_close(gaussian(images, 6.4, "reflect", 3.0), torch.from_numpy(expected))


def test_defocus_by_hand():
    """Radius 1 is the centre and its four neighbours, softened by a Gaussian of width 0.2, which is next to nothing."""
    point = torch.zeros(1, 1, 32, 32)
    point[..., 16, 16] = 1
    result = corrupt(point, "defocus_blur", 4)[0, 0]
    expected = torch.zeros(32, 32)
    expected[16, 15:18] = expected[15:18, 16] = 0.2
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    square = corrupt(point, "defocus_blur", 5)[0, 0, 15:18, 15:18]  # radius 1.5 holds the corners too
    torch.testing.assert_close(square, torch.full((3, 3), 1 / 9), atol=1e-5, rtol=0)
    soft = torch.exp(-0.5 * (torch.tensor([-1.0, 0, 1]) / 0.4) ** 2)
    soft = torch.outer(soft, soft) / soft.sum() ** 2
    torch.testing.assert_close(corrupt(point, "defocus_blur", 1)[0, 0, 15:18, 15:18], soft)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_defocus_is_scipys_filter_with_mirrored_edges(scenes, severity):
    point = torch.zeros(1, 1, 32, 32)
    point[..., 16, 16] = 1
    kernel = corrupt(point, "defocus_blur", severity)[0, 0, 13:20, 13:20].numpy()
    expected = ndimage.correlate(scenes[0, 0].numpy(), kernel, mode="mirror")
    torch.testing.assert_close(corrupt(scenes[:1], "defocus_blur", severity)[0, 0], torch.from_numpy(expected))


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_glass_line_by_line_is_pixel_by_pixel(reach):
    generator = torch.Generator().manual_seed(reach)
    height, width = 15, 12
    offsets = torch.randint(-reach, reach, (2, 3, height, width), generator=generator)
    order = torch.arange(height * width).expand(3, -1).clone()
    _scatter_pixels(order, (offsets[0] * width + offsets[1]).flatten(1), height, width, reach)
    for image in range(3):
        seen = np.arange(height * width).reshape(height, width)
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                down, right = offsets[:, image, row, column].tolist()
                seen[row, column] = seen[row + down, column + right]
        np.testing.assert_array_equal(order[image].view(height, width).numpy(), seen)


def test_glass_uses_pixels_from_above_and_left():
    ramp = torch.arange(32.0).div(32).expand(8, 1, 32, 32)
    shift = (ramp - corrupt(ramp, "glass_blur", 1)).mul(32).round()[..., 2:, 2:]
    assert set(shift.unique().tolist()) == {0.0, 1.0}
    assert shift.mean().item() == pytest.approx(0.5, abs=0.05)


def test_motion_along_the_row_by_hand():
    """At 0° a point leaves a trail to its left, since every pixel averages those to its right."""
    point = torch.zeros(1, 1, 16, 32)
    point[..., 8, 20] = 1
    trail = blur_along_line(point, 6, 2, (0, 0), Draws(0, "motion_blur", torch.zeros(1)))[0, 0]
    weights = torch.exp(-0.5 * (torch.arange(11) / 2.0) ** 2)
    expected = torch.zeros(16, 32)
    expected[8, 10:21] = (weights / weights.sum()).flip(0)
    torch.testing.assert_close(trail, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("angles", [(30, 30), (-120, -120)])
def test_motion_is_the_weighted_mean_of_shifted_images(scenes, angles):
    radius, sigma = 3, 2.0
    angle = math.radians(angles[0])
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    image = scenes[0, 0].double().numpy()
    shifted = [
        ndimage.shift(image, (-i * math.sin(angle), -i * math.cos(angle)), order=1, mode="nearest")
        for i in range(2 * radius + 1)
    ]
    expected = np.tensordot(weights / weights.sum(), shifted, 1)
    result = blur_along_line(scenes[:1, :1], radius, sigma, angles, Draws(0, "snow", torch.zeros(1)))[0, 0]
    torch.testing.assert_close(result.double(), torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_motion_angles_differ_by_image():
    point = torch.zeros(200, 1, 32, 32)
    point[..., 16, 24] = 1
    trails = corrupt(point, "motion_blur", 3)
    columns = (trails * torch.arange(32.0)).sum((1, 2, 3))
    rows = (trails * torch.arange(32.0)[:, None]).sum((1, 2, 3))
    angles = torch.rad2deg(torch.atan2(16 - rows, 24 - columns))
    assert -45.5 < angles.min() < -42
    assert 42 < angles.max() < 45.5
    assert abs(angles.mean()) < 6


def zoomed(image, factor):
    """The middle enlarged by SciPy, (H, W)."""
    kept = [math.ceil(length / factor) for length in image.shape]
    first = [(length - inside) // 2 for length, inside in zip(image.shape, kept, strict=True)]
    middle = image[first[0] : first[0] + kept[0], first[1] : first[1] + kept[1]]
    larger = ndimage.zoom(middle, factor, order=1)
    trim = [(length - inside) // 2 for length, inside in zip(larger.shape, image.shape, strict=True)]
    return larger[trim[0] : trim[0] + image.shape[0], trim[1] : trim[1] + image.shape[1]]


@pytest.mark.parametrize(("severity", "end"), [*enumerate((1.06, 1.11, 1.16, 1.21, 1.26), 1)])
def test_zoom_blur_is_the_mean_of_scipys_zooms(scenes, severity, end):
    """Of the published steps, which by floating point include the end itself at severities 1 and 2."""
    image = scenes[0, 0].double().numpy()
    factors = np.arange(1, end, 0.01)
    expected = np.mean([image, *(zoomed(image, factor) for factor in factors)], 0)
    result = corrupt(scenes[:1], "zoom_blur", severity)[0, 0]
    torch.testing.assert_close(result.double(), torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_zoom_keeps_the_size_of_any_axis():
    for size in (8, 27, 32, 63):
        for factor in (1.0, 1.01, 1.25, 2.25):
            matrix = zoom_matrix(size, factor)
            assert matrix.shape == (size, size)
            torch.testing.assert_close(matrix.sum(1), torch.ones(size))
    assert torch.equal(zoom_matrix(32, 1.0), torch.eye(32))
