"""Digital corruptions: brightness, contrast, saturation, elastic transform and pixelation."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.linear import apply, box_matrix, gaussian, positions, sample, scale


def brightness(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images with HSV value + c: hue and saturation are unchanged, and black becomes grey."""
    c = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    value = images.amax(1, keepdim=True)
    brighter = (value + c).clamp_(max=1)
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-6)), brighter)


def contrast(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return (x - mean)·c + mean, with the mean of each channel of each image."""
    c = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    return torch.lerp(images.mean((2, 3), keepdim=True), images, c)


def saturate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images with HSV saturation·c₀ + c₁; grey pixels have the hue of red, and grey images are unchanged."""
    c = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    if images.shape[1] == 1:
        return images
    value = images.amax(1, keepdim=True)
    spread = value - images.amin(1, keepdim=True)
    saturation = spread / value.clamp(min=1e-6)
    wanted = (saturation * c[0] + c[1]).clamp_(max=1)
    coloured = value - (value - images) * (wanted / saturation.clamp(min=1e-6))
    red = value * (1 - wanted * wanted.new_tensor([0, 1, 1]).view(3, 1, 1))
    return torch.where(spread > 0, coloured, red)


def pixelate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images reduced to c % of their size and enlarged again, both with a box filter."""
    c = (95, 90, 85, 75, 65)[severity - 1]
    height, width = images.shape[-2:]
    return apply(images, box_matrix(height, max(1, height * c // 100)), box_matrix(width, max(1, width * c // 100)))


def elastic_transform(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images after a random affine map (three points move by up to c₂) and shifts of pixels by smooth noise.

    All parameters are relative to the size of the image.
    """
    strength, smoothing, affine = (
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    size = 32 * scale(images)
    x, y = positions(images)
    moved = sample(images, *_affine(images, x, y, affine * size, draws), repeat_edge=False)
    if not strength:
        return moved
    noise = draws.draw_signed(2, *images.shape[-2:])
    shift = gaussian(noise, smoothing * size, "reflect", truncate=3.0).mul_(strength * size)
    return sample(moved, x + shift[:, 0], y + shift[:, 1], repeat_edge=True)


def _affine(images: Tensor, x: Tensor, y: Tensor, most: float, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the source of each pixel when three points around the centre move by up to `most` pixels per axis."""
    height, width = images.shape[-2:]
    centre = x.new_tensor([width // 2, height // 2])
    third = min(height, width) // 3
    before = centre + third * x.new_tensor([[1, 1], [1, -1], [-1, -1]])  # (3, 2), as (x, y)
    after = before + most * draws.draw_signed(3, 2)  # (B, 3, 2)
    (a, b), (c, d) = (after[:, 0] - after[:, 1]).unbind(1), (after[:, 2] - after[:, 1]).unbind(1)
    across, down = before[0] - before[1], before[2] - before[1]
    area = (a * d - b * c)[:, None, None]
    u, v = x - after[:, 1, 0, None, None], y - after[:, 1, 1, None, None]  # (B, H, W)
    first = (u * d[:, None, None] - v * c[:, None, None]) / area
    second = (v * a[:, None, None] - u * b[:, None, None]) / area
    return tuple(before[1, axis] + first * across[axis] + second * down[axis] for axis in (0, 1))  # type: ignore[return-value]
