"""Gaussian noise: inputs move at random, which asks the teachers nothing and is what other moves are compared with.

    ε ~ N(0, (η / 255)²) for each pixel                                                      (1)

A baseline of G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021,
arXiv:2110.14149.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.distill.perturbation import Asked, Perturbation


@dataclass(frozen=True)
class Gaussian(Perturbation):
    """Noise on every pixel."""

    def moves(self, pixels: Tensor, teachers: Asked, student: Asked, source: torch.Generator) -> Tensor:
        """Equation (1) in units of η / 255."""
        return torch.randn(pixels.shape, generator=source).to(pixels)
