"""Gaussian noise: a random step that does not depend on the teachers, the baseline of all other perturbations.

    ε ~ N(0, (η / 255)²) for each pixel                                                                (1)

A baseline of G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021,
arXiv:2110.14149.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.perturbation import MemberLogits, PixelStep


@checked
@dataclass(frozen=True)
class Gaussian(PixelStep):
    """Add Gaussian noise to every pixel.

    Args:
        step: η, the root mean square of a step, in 1/255 of the pixel range.
    """

    def direction(
        self, pixels: Tensor, teachers: MemberLogits, student: MemberLogits, generator: torch.Generator
    ) -> Tensor:
        """Return equation (1) in units of η / 255.

        Args:
            pixels: Floating-point inputs before normalization, (B, ...).
            teachers: The teachers' logits as functions of the pixels.
            student: The student's logits as functions of the pixels.
            generator: The generator of random numbers.
        """
        return torch.randn(pixels.shape, generator=generator).to(pixels)
