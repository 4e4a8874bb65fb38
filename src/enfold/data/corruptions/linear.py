"""Linear maps of images: matrices for rows and columns, a kernel for each image, bilinear sampling.

The published parameters are for 32 x 32 pixels. For other sizes every length in pixels (blur width, radius, shift) is
multiplied by `scale` = min(H, W) / 32, so that enlarged images look the same; parameters relative to the image (zoom,
pixelate) or to its values (noise, colours, JPEG) are unchanged. Lengths of at least one pixel (a disk, the shifts of
glass blur, the grain of snow) are not made smaller than published.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Edge = Literal["nearest", "reflect"]  # aaa|abcd|ddd or cba|abcd|dcb


def scale(images: Tensor) -> float:
    """Return the size of the images relative to the 32 x 32 pixels of the published parameters."""
    return min(images.shape[-2:]) / 32


def apply(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows · image · columnsᵀ for each image: (..., H, W) -> (..., H', W')."""
    return rows.to(images.device) @ (images @ columns.T.to(images.device))


def gaussian(images: Tensor, sigma: float, edge: Edge = "nearest", truncate: float = 4.0) -> Tensor:
    """Return the Gaussian blur of each channel, with SciPy's kernel: truncated at `truncate` sigma, sum 1.

    Args:
        images: Images (B, C, H, W).
        sigma: Standard deviation in pixels.
        edge: How the image continues beyond its edge.
        truncate: Radius of the kernel in standard deviations.
    """
    height, width = images.shape[-2:]
    return apply(images, gaussian_matrix(height, sigma, edge, truncate), gaussian_matrix(width, sigma, edge, truncate))


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, edge: Edge, truncate: float) -> Tensor:
    """Return the (size, size) matrix of the blur along one axis.

    Args:
        size: Pixels along the axis.
        sigma: Standard deviation in pixels.
        edge: How the image continues beyond its edge.
        truncate: Radius of the kernel in standard deviations.
    """
    reach = int(truncate * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    places = torch.arange(size)[:, None] + offsets
    if edge == "nearest":
        places = places.clamp(0, size - 1)
    else:
        places = places.remainder(2 * size)
        places = torch.minimum(places, 2 * size - 1 - places)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, places, (weights / weights.sum()).expand(size, -1)).float()


@lru_cache(maxsize=64)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """Return the matrix that enlarges the centre of one axis by linear interpolation and crops it to `size`."""
    source = math.ceil(size / factor)
    enlarged = max(round(source * factor), size)
    first, trimmed = (size - source) // 2, (enlarged - size) // 2
    places = torch.arange(trimmed, trimmed + size, dtype=torch.float64) * ((source - 1) / max(enlarged - 1, 1))
    low = places.floor().clamp(max=max(source - 2, 0))
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows = torch.arange(size)
    matrix[rows, first + low.long()] = 1 - (places - low)
    matrix[rows, first + (low.long() + 1).clamp(max=source - 1)] += places - low
    return matrix.float()


@lru_cache(maxsize=64)
def box_matrix(size: int, smaller: int) -> Tensor:
    """Return the matrix that reduces one axis to `smaller` pixels and enlarges it again, as Pillow's BOX filter does.

    A block is the mean of the pixels whose centres are in it; enlarging repeats the nearest block.
    """
    ratio = size / smaller
    starts = (torch.arange(smaller + 1, dtype=torch.float64) * ratio + 0.5).floor()
    centres = torch.arange(size, dtype=torch.float64)
    inside = (centres >= starts[:-1, None]) & (centres < starts[1:, None])  # (smaller, size)
    means = inside.double() / inside.sum(1, keepdim=True)
    nearest = ((torch.arange(size, dtype=torch.float64) + 0.5) / ratio).floor().long().clamp(max=smaller - 1)
    return means[nearest].float()


def convolve(images: Tensor, kernels: Tensor, padding: tuple[int, int, int, int], mode: str) -> Tensor:
    """Return the correlation of each image with its own kernel (B, h, w).

    Args:
        images: Images (B, C, H, W).
        kernels: Kernels (B, h, w).
        padding: Padding (left, right, top, bottom).
        mode: Mode of the padding, as in `torch.nn.functional.pad`.
    """
    batch, channels, height, width = images.shape
    padded = F.pad(images, padding, mode=mode)
    groups = batch * channels
    weights = kernels[:, None].expand(-1, channels, -1, -1).reshape(groups, 1, *kernels.shape[1:])
    return F.conv2d(padded.reshape(1, groups, *padded.shape[2:]), weights, groups=groups).view(
        batch, channels, height, width
    )


def sample(images: Tensor, x: Tensor, y: Tensor, *, repeat_edge: bool) -> Tensor:
    """Return bilinear samples at pixel coordinates x and y, each (B, H, W).

    Coordinates beyond the image are reflected, with the edge pixel repeated if `repeat_edge`.

    Args:
        images: Images (B, C, H, W).
        x: Columns, (B, H, W).
        y: Rows, (B, H, W).
        repeat_edge: Whether the edge pixel is repeated in the reflection.
    """
    height, width = images.shape[-2:]
    if repeat_edge:
        grid = torch.stack(((2 * x + 1) / width - 1, (2 * y + 1) / height - 1), -1)
    else:
        grid = torch.stack((2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1), -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=not repeat_edge)


def positions(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates x and y of every pixel, (H, W) each."""
    height, width = images.shape[-2:]
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device, dtype=images.dtype),
        torch.arange(width, device=images.device, dtype=images.dtype),
        indexing="ij",
    )
    return x, y
