"""Blur: Gaussian, defocus, glass, motion and zoom."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.linear import convolve, gaussian, scale, zoom_matrix

ZOOM_STEP = 1.01 - 1  # slightly more than 0.01 in float64
NEGLIGIBLE = 4.8  # standard deviations: further weights are below 1e-5 of the first


def gaussian_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images blurred by a Gaussian of width c."""
    c = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return gaussian(images, c * scale(images))


def defocus_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images blurred by a disk of radius c₀, smoothed by a 3 x 3 Gaussian of width c₁; edges are reflected."""
    radius, softening = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    kernel = _disk(radius, softening, max(1, scale(images))).to(images.device)  # a smaller disk would be a single pixel
    reach = len(kernel) // 2
    return convolve(images, kernel.expand(len(images), -1, -1), (reach,) * 4, "reflect")


def _disk(radius: float, softening: float, factor: float) -> Tensor:
    soft = max(1, round(factor))
    reach = int(radius * factor) + soft
    squares = torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2
    disk = (squares[:, None] + squares <= (radius * factor) ** 2).double()
    weights = torch.exp(-0.5 * (torch.arange(-soft, soft + 1).double() / (softening * factor)) ** 2)
    edge = torch.outer(weights, weights)[None, None]
    return F.conv2d(disk[None, None] / disk.sum(), edge / edge.sum(), padding=soft)[0, 0].float()


def glass_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images after a Gaussian of width σ, exchanges of each pixel with one at most δ away, and the Gaussian."""
    sigma, iterations = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    factor = scale(images)
    reach = max(1, round(factor))
    height, width = images.shape[-2:]
    order = torch.arange(height * width, device=images.device).expand(len(images), -1).clone()
    for _ in range(iterations):
        offsets = draws.uniform(2, height, width).mul_(2 * reach).floor_().sub_(reach).long()  # -δ ... δ - 1
        _scatter_pixels(order, (offsets[:, 0] * width + offsets[:, 1]).flatten(1), height, width, reach)
    blurred = gaussian(images, sigma * factor)
    moved = blurred.flatten(2).gather(2, order[:, None].expand(-1, images.shape[1], -1))
    return gaussian(moved.view_as(images), sigma * factor)


def _scatter_pixels(order: Tensor, offsets: Tensor, height: int, width: int, reach: int) -> None:
    """Scan from the bottom right and assign each pixel the current value of its partner, in place, (B, H·W) each.

    Pixels on a line 2δ·row + column = constant do not depend on each other, and all pixels they depend on are on
    earlier lines of the scan, so that processing line by line equals processing pixel by pixel.
    """
    rows = torch.arange(reach + 1, height - reach + 1, device=order.device)
    columns = torch.arange(reach + 1, width - reach + 1, device=order.device)
    places = (rows[:, None] * width + columns).flatten()
    lines = (rows[:, None] * (2 * reach) + columns).flatten()
    sizes = lines.unique(return_counts=True)[1].flip(0).tolist()
    for now in places[lines.argsort(descending=True)].split(sizes):
        order[:, now] = order.gather(1, offsets[:, now] + now)


def motion_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images blurred by one-sided Gaussian weights of width c₁ along a line at -45° ... 45°, cut at 2·c₀."""
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    factor = scale(images)
    return blur_along_line(images, radius * factor, sigma * factor, (-45, 45), draws)


def blur_along_line(images: Tensor, radius: float, sigma: float, angles: tuple[float, float], draws: Draws) -> Tensor:
    """Return the mean of each image shifted by i = 0, 1, ... pixels at a random angle, weighted by exp(-i²/2σ²).

    Shifts are bilinear and edges replicated: each image is correlated with the kernel of all its shifts.

    Args:
        images: Images (B, C, H, W).
        radius: Half of the maximum shift in pixels.
        sigma: Width σ in pixels.
        angles: Range of the angle in degrees.
        draws: Random numbers.
    """
    last = min(2 * math.ceil(radius), math.ceil(NEGLIGIBLE * sigma))
    steps = torch.arange(last + 1, device=images.device, dtype=images.dtype)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    low, high = (math.radians(angle) for angle in angles)
    angle = draws.uniform(1).mul_(high - low).add_(low)  # (B, 1)
    left, right = _reach(math.cos, low, high, last)
    top, bottom = _reach(math.sin, low, high, last)
    width, height = left + right + 1, top + bottom + 1
    x, y = steps * angle.cos() + left, steps * angle.sin() + top  # (B, steps)
    column, row = x.floor(), y.floor()
    kernels = torch.zeros(len(images), height * width, device=images.device, dtype=images.dtype)
    for down in (0, 1):
        for across in (0, 1):
            weight = (1 - (x - column - across).abs()) * (1 - (y - row - down).abs()) * (weights / weights.sum())
            kernels.scatter_add_(1, ((row + down) * width + column + across).long(), weight)
    return convolve(images, kernels.view(-1, height, width), (left, right, top, bottom), "replicate")


def _reach(function: Callable[[float], float], low: float, high: float, length: int) -> tuple[int, int]:
    """Return the extent of a line at these angles to both sides of its start, plus one pixel for interpolation."""
    values = [length * function(low + (high - low) * step / 180) for step in range(181)]
    return max(0, math.ceil(-min(values))) + 1, max(0, math.ceil(max(values))) + 1


def zoom_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return the mean of each image and of its centre enlarged by 0, 1, ... c %.

    As in the published code, floating-point rounding adds one step to the first two ranges (6 and 11 instead of 5 and
    10 %), and the last zoom is slightly above 1.25.
    """
    c = (6, 11, 15, 20, 25)[severity - 1]
    zooms = [1.0, *(1 + step * ZOOM_STEP for step in range(c + 1))]
    height, width = images.shape[-2:]
    rows = torch.stack([zoom_matrix(height, zoom) for zoom in zooms], -1).flatten(1)  # (H, H·Z)
    columns = torch.cat([zoom_matrix(width, zoom) for zoom in zooms])  # (Z·W, W)
    across: Tensor = images @ columns.T.to(images.device)  # (B, C, H, Z·W)
    stacked: Tensor = across.unflatten(-1, (len(zooms), width)).flatten(2, 3)  # (B, C, H·Z, W)
    return (rows / len(zooms)).to(images.device) @ stacked
