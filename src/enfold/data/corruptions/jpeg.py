"""JPEG compression and decompression as matrix products: the lossy steps, without entropy coding.

1. levels 0 ... 255 -> Y, Cb, Cr (rounded); Cb and Cr are downsampled by means of 2 x 2
2. blocks of 8 x 8, as rows of 64, times the 64 x 64 matrix of the two-dimensional DCT
3. coefficient -> q·round(coefficient / q), with the standard tables scaled by the quality as in libjpeg
4. inverse: transposed matrix, rounding, Cb and Cr upsampled with libjpeg's triangle filter, RGB
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.data.corruptions.draws import Draws

LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61),
    *(12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77),
    *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101),
    *(72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    *(17, 18, 24, 47, 99, 99, 99, 99),
    *(18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 32),
)
TO_YCC = ((0.299, 0.587, 0.114), (-0.168735892, -0.331264108, 0.5), (0.5, -0.418687589, -0.081312411))
TIE = 1 / 1024  # rounds halves, which are common, away from zero in spite of rounding errors of the products


def jpeg_compression(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images after JPEG of quality c, with chroma subsampling."""
    return compress(images, (80, 65, 58, 50, 40)[severity - 1])


def compress(images: Tensor, quality: int) -> Tensor:
    """Return images in [0, 1], (B, 1 or 3, H, W), after JPEG of a quality from 1 to 100."""
    levels = images.mul(255).round_()
    height, width = images.shape[-2:]
    if images.shape[1] == 1:
        return _quantize(levels, _table(LUMINANCE, quality))[..., :height, :width] / 255
    matrix = levels.new_tensor(TO_YCC)
    ycc = torch.einsum("ic,bchw->bihw", matrix, _pad(levels, 2, 16))
    luma = _quantize(ycc[:, :1].round(), _table(LUMINANCE, quality))[..., :height, :width]
    chroma = _quantize(_downsample((ycc[:, 1:] + 128).round_()), _table(CHROMINANCE, quality))
    cb, cr = _upsample(chroma[..., : -(-height // 2), : -(-width // 2)])[..., :height, :width].sub_(128).unbind(1)
    y = luma[:, 0]
    rgb = torch.stack((y + 1.402 * cr, y - 0.344136286 * cb - 0.714136286 * cr, y + 1.772 * cb), 1)
    return rgb.round_().clamp_(0, 255).div_(255)


def _pad(levels: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column up to multiples of these."""
    height, width = levels.shape[-2:]
    if height % rows == width % columns == 0:
        return levels
    return F.pad(levels, (0, -width % columns, 0, -height % rows), mode="replicate")


def _quantize(planes: Tensor, table: Tensor) -> Tensor:
    """Return planes of levels (B, P, H, W) after steps 2 to 4, padded to multiples of 8."""
    planes = _pad(planes, 8, 8)
    batch, number, height, width = planes.shape
    matrix, table = _dct().to(planes.device), table.to(planes.device)
    blocks = planes.view(batch, number, height // 8, 8, width // 8, 8).transpose(3, 4).reshape(-1, 64)
    coefficients = ((blocks - 128) @ matrix.T).div_(table)
    coefficients = coefficients.abs().add_(0.5 + TIE).floor_().mul_(coefficients.sign())
    blocks = (coefficients.mul_(table) @ matrix).add_(128 + 0.5 + TIE).floor_().clamp_(0, 255)
    return blocks.view(batch, number, height // 8, width // 8, 8, 8).transpose(3, 4).reshape(planes.shape)


def _downsample(planes: Tensor) -> Tensor:
    """Return means of 2 x 2 pixels, alternately rounded down and up as in libjpeg."""
    sums = F.avg_pool2d(planes, 2, divisor_override=1)
    bias = torch.arange(sums.shape[-1], device=planes.device) % 2 + 1
    return (sums + bias).div_(4).floor_()


def _upsample(planes: Tensor) -> Tensor:
    """Return planes upsampled by 2, each value mixed 9 : 3 : 3 : 1 with its neighbours."""
    near = F.pad(planes, (0, 0, 1, 1), mode="replicate")
    rows = torch.stack((3 * planes + near[..., :-2, :], 3 * planes + near[..., 2:, :]), 3).flatten(2, 3)
    near = F.pad(rows, (1, 1, 0, 0), mode="replicate")
    left, right = 3 * rows + near[..., :-2] + 8, 3 * rows + near[..., 2:] + 7
    return torch.stack((left, right), 4).div_(16).floor_().flatten(3, 4)


@cache
def _dct() -> Tensor:
    """Return the orthogonal DCT matrix; row 8u + v is the pattern of frequency (u, v) in a block of 8 x 8."""
    positions = torch.arange(8, dtype=torch.float64)
    one = torch.cos((2 * positions + 1) * positions[:, None] * (math.pi / 16)) / 2
    one[0] /= math.sqrt(2)
    return torch.kron(one, one).float()


@cache
def _table(base: tuple[int, ...], quality: int) -> Tensor:
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return torch.tensor([min(max((entry * percent + 50) // 100, 1), 255) for entry in base], dtype=torch.float32)
