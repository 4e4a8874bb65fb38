"""Spatter: water drops or mud on the lens, in PyTorch instead of OpenCV."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.linear import gaussian, scale
from enfold.data.corruptions.weather import paint

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
FAR = 20  # maximum distance in pixels
WEAK, STRONG = 50, 150  # thresholds of the Canny edge detector
GROWTH = 8  # maximum number of steps from a strong edge along weak edges


def spatter(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images with spatter where smooth noise exceeds a threshold: bright water drops, or opaque mud."""
    mean, std, sigma, threshold, strength, mud = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )[severity - 1]
    factor = scale(images)
    channels, height, width = images.shape[1:]
    liquid = gaussian(draws.normal(1, height, width).mul_(std).add_(mean), sigma * factor)
    liquid = torch.where(liquid < threshold, 0, liquid)
    if mud:
        cover = gaussian((liquid > threshold).to(images.dtype), strength * factor)
        cover = torch.where(cover < 0.8, 0, cover)
        return images * (1 - cover) + paint(cover, MUD, channels)
    glint = _glint(liquid, factor)
    brightest = glint.amax((2, 3), keepdim=True).clamp(min=1e-6)  # images without drops are unchanged
    return images + paint(strength * glint / brightest, WATER, channels)


def _glint(liquid: Tensor, factor: float) -> Tensor:
    """Return the liquid, embossed by the distance to the edges of the drops."""
    distance = distance_to(edges(liquid.clamp(max=1).mul(255).floor()), round(FAR * factor))
    depth = equalise_histogram(_mean3(distance).floor())
    emboss = depth.new_tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    return liquid * _mean3(_filter3(depth, emboss).clamp(0, 255))


def edges(levels: Tensor) -> Tensor:
    """Return Canny edges of images (B, 1, H, W) in [0, 255]."""
    across = _filter3(levels, levels.new_tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]))
    down = _filter3(levels, levels.new_tensor([[-1, -2, -1], [0, 0, 0], [1, 2, 1]]))
    steep = across.abs() + down.abs()
    near = F.unfold(F.pad(steep, (1, 1, 1, 1)), 3).view(len(levels), 9, *levels.shape[-2:])
    flat, upright = down.abs() < 0.4142 * across.abs(), down.abs() > 2.4142 * across.abs()
    rising = (across * down) < 0
    before = torch.where(
        flat, near[:, 3:4], torch.where(upright, near[:, 1:2], torch.where(rising, near[:, 2:3], near[:, 0:1]))
    )
    after = torch.where(
        flat, near[:, 5:6], torch.where(upright, near[:, 7:8], torch.where(rising, near[:, 6:7], near[:, 8:9]))
    )
    ridge = (steep > before) & (steep >= after)
    weak, found = ridge & (steep > WEAK), ridge & (steep > STRONG)
    for _ in range(GROWTH):
        found = weak & (F.max_pool2d(found.to(levels.dtype), 3, 1, 1) > 0)
    return found


def distance_to(places: Tensor, far: int) -> Tensor:
    """Return the exact Euclidean distance of every pixel to the nearest of `places` (B, 1, H, W), at most `far`."""
    squares = torch.where(places, 0.0, float(far**2))
    for axis in (2, 3):
        nearest = squares.clone()
        for step in range(1, min(far, squares.shape[axis] - 1) + 1):
            length = squares.shape[axis] - step
            for here, there in ((0, step), (step, 0)):
                best = nearest.narrow(axis, here, length)
                torch.minimum(best, squares.narrow(axis, there, length) + step**2, out=best)
        squares = nearest
    return squares.sqrt().clamp(max=far)


def equalise_histogram(levels: Tensor) -> Tensor:
    """Return integer levels 0 ... 255 of each image after histogram equalization."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), 256, device=levels.device).scatter_add_(1, flat, torch.ones_like(levels).flatten(1))
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    below = (counts.cumsum(1) - lowest) * (255 / (flat.shape[1] - lowest).clamp(min=1))
    return below.gather(1, flat).round_().view_as(levels)


def _filter3(images: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(F.pad(images, (1, 1, 1, 1), mode="reflect"), kernel.to(images.dtype)[None, None])


def _mean3(images: Tensor) -> Tensor:
    return _filter3(images, torch.full((3, 3), 1 / 9, device=images.device))
