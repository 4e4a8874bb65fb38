"""Weather: snow, frost (a generated texture instead of photographs) and fog."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.data.corruptions.blur import blur_along_line
from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.linear import apply, positions, scale, zoom_matrix

LUMA = (0.299, 0.587, 0.114)
ICE = (0.86, 0.94, 1.0)  # a bluish white
REACH = 46  # diagonal of a 32 x 32 image in pixels


def grey(images: Tensor) -> Tensor:
    """Return the luma of RGB images, and grey images unchanged: (B, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("bchw,c->bhw", images, images.new_tensor(LUMA))[:, None]


def paint(layer: Tensor, colour: tuple[float, float, float], channels: int) -> Tensor:
    """Return a layer (B, 1, H, W) in a colour, or in its luma for grey images: (B, C, H, W)."""
    if channels == 1:
        return layer * sum(weight * value for weight, value in zip(LUMA, colour, strict=True))
    return layer * layer.new_tensor(colour).view(3, 1, 1)


def snow(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return brightened images plus flakes (thresholded noise with motion blur) and the same flakes rotated by 180°."""
    mean, std, zoom, threshold, radius, sigma, weight = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    factor = scale(images)
    height, width = images.shape[-2:]
    larger = max(1.0, zoom * factor)
    flakes = draws.normal(1, height, width).mul_(std).add_(mean)
    flakes = apply(flakes, zoom_matrix(height, larger), zoom_matrix(width, larger))
    flakes = torch.where(flakes < threshold, 0, flakes).clamp_(max=1)
    flakes = blur_along_line(flakes, radius * factor, sigma * factor, (-135, -45), draws)
    bleached = weight * images + (1 - weight) * torch.maximum(images, 1.5 * grey(images) + 0.5)
    return bleached + flakes + flakes.rot90(2, (2, 3))


def frost(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return c₀·x + c₁·frost.

    Differs from the paper: frost is a generated texture instead of crops of photographs.
    """
    c = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return c[0] * images + c[1] * paint(frost_texture(images, draws), ICE, images.shape[1])


def frost_texture(images: Tensor, draws: Draws) -> Tensor:
    """Return a frost texture (B, 1, H, W): needles in three directions at 60° over a haze of varying density.

    Needles are ridges of smooth noise that is stretched along their direction and bent by other smooth noise.
    """
    x, y = positions(images)
    factor = scale(images)
    x, y = (x / factor)[None], (y / factor)[None]  # in pixels of a 32 x 32 image
    turn = draws.uniform(1, 1) * (math.pi / 3)
    haze = _noise(draws, x, y, 11.0, 11.0)
    bend = 1.5 * _noise(draws, x, y, 10.0, 10.0)
    ice = torch.zeros_like(haze)
    for index, (along, across) in enumerate(((16.0, 4.5), (14.0, 3.5), (12.0, 2.5))):
        angle = turn + index * (math.pi / 3)
        u = x * angle.cos() + y * angle.sin()
        v = y * angle.cos() - x * angle.sin() + bend
        ridge = (1 - _noise(draws, u, v, along, across).abs() * 1.6).clamp_(min=0)
        ice = torch.maximum(ice, ridge.square_())
    grain = _noise(draws, x, y, 1.3, 1.3)
    return (0.3 + 0.16 * haze + 0.6 * ice * (0.7 + 0.3 * haze) + 0.04 * grain).clamp_(0, 1)[:, None]


def _noise(draws: Draws, x: Tensor, y: Tensor, width: float, height: float) -> Tensor:
    """Return smooth noise of about unit scale at (x, y), with features of `width` by `height` pixels: (B, H, W)."""
    columns, rows = (2 * math.ceil(REACH / feature) for feature in (width, height))
    lattice = draws.normal(1, rows, columns)
    grid = torch.stack(torch.broadcast_tensors(x * (2 / width / columns), y * (2 / height / rows)), -1)
    grid = grid.expand(len(lattice), -1, -1, -1)
    return F.grid_sample(lattice, grid, mode="bilinear", padding_mode="reflection", align_corners=False)[:, 0]


def fog(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images plus c₀ times a plasma fractal, rescaled so that the maximum of each image is unchanged."""
    c = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    height, width = images.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    plasma = plasma_fractal(draws, size, c[1])[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + c[0] * plasma) * (brightest / (brightest + c[0]))


def plasma_fractal(draws: Draws, size: int, decay: float) -> Tensor:
    """Return clouds in [0, 1] by the diamond-square algorithm on a torus of 2ⁿ pixels: (B, size, size).

    As in the published code, the noise decreases by decay² with each halving of the step.
    """
    clouds = torch.zeros(draws.batch, size, size, device=draws.device)
    step, amplitude = size, 1.0
    while step > 1:
        half, count = step // 2, size // step
        noise = draws.draw_signed(3, count, count).mul_(amplitude)
        corners = clouds[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        centres = (pairs + pairs.roll(-1, 2)) / 4 + noise[:, 0]
        clouds[:, half::step, half::step] = centres
        edges = corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)
        clouds[:, ::step, half::step] = edges / 4 + noise[:, 1]
        edges = pairs + centres + centres.roll(1, 2)
        clouds[:, half::step, ::step] = edges / 4 + noise[:, 2]
        step, amplitude = half, amplitude / decay**2
    low, high = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
    return (clouds - low) / (high - low)
