"""Noise: Gaussian, shot, impulse and speckle, independent for every pixel and channel."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.data.corruptions.draws import Draws, to_normal

SMALL_RATE = 8.0  # sums of terms below; above, the expansion is off by one in at most 3 of 1,000 draws
TERMS = 34  # 1 - CDF(34) of the largest small rate is below the resolution of float32


def gaussian_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return x + c·N(0, 1)."""
    c = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return draws.normal(*images.shape[1:]).mul_(c).add_(images)


def shot_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return Poisson(c·x) / c."""
    c = (500, 250, 100, 75, 50)[severity - 1]
    return poisson(images * c, draws.draw_signed(*images.shape[1:])).div_(c)


def impulse_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return images with a fraction c of the values set to 0 or 1 with equal probability."""
    c = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    signed = draws.draw_signed(*images.shape[1:])
    return torch.where(signed.abs() < 1 - c, images, (signed > 0).to(images.dtype))


def speckle_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Return x + c·x·N(0, 1)."""
    c = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return draws.normal(*images.shape[1:]).mul_(c).add_(1).mul_(images)


def poisson(rates: Tensor, signed: Tensor) -> Tensor:
    """Return the Poisson quantile of (1 + signed) / 2 for each rate: one count per uniform number.

    From `SMALL_RATE` on it uses the expansion about the normal quantile w (Giles, "Approximation of the inverse Poisson
    cumulative distribution function", 2016): floor(λ + w·√λ + 1/3 + w²/6 - (w + w³/2) / (36·√λ)).
    """
    root = rates.clamp(min=SMALL_RATE).sqrt_()
    w = to_normal(signed)
    square = w * w
    tail = square.mul(-1 / 72).sub_(1 / 36).mul_(w).div_(root)
    counts = root.mul(w).add_(rates).add_(square, alpha=1 / 6).add_(1 / 3).add_(tail).floor_().clamp_(min=0)
    small = rates < SMALL_RATE
    counts[small] = _quantile_by_sum(rates[small], signed[small].add(1).div_(2))
    return counts


def _quantile_by_sum(rates: Tensor, uniform: Tensor) -> Tensor:
    """Return the exact quantile: the number of partial sums of the probabilities below the uniform number."""
    term = (-rates).exp_()
    total, counts = term.clone(), torch.zeros_like(rates)
    for k in range(1, TERMS):
        counts += uniform > total
        term.mul_(rates).div_(k)
        total += term
    return counts
