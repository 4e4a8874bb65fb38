"""Output diversified sampling (ODS): a step in which one teacher's probabilities change in a random direction.

    g = ∇_x w^T softmax(T_m(x) / τ),   w ~ U(-1, 1)^K,   one m for a batch                             (1)
    ε = (η / 255) √D g / ||g||                                                                         (2)

Y. Tashiro, Y. Song, S. Ermon: Diversity can be Transferred: Output Diversification for White- and Black-box Attacks,
NeurIPS 2020, arXiv:2003.06878; for distillation: G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From
Ensembles, NeurIPS 2021, arXiv:2110.14149.

A direction drawn for one teacher is unrelated to the others' outputs, so that teachers disagree more after the step.
Each example has its own w. The teachers' term is computed at the perturbed inputs, the labels' term at the clean ones.

Differs from the first paper: one step, by probabilities and not by logits, as in the second. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.loss import Temperature
from enfold.distill.perturbation import MemberLogits, PixelStep, input_gradient, normalise_rms


@checked
@dataclass(frozen=True)
class ODS(PixelStep):
    """Step along the gradient of a random mixture of one teacher's probabilities.

    Args:
        step: η, the root mean square of a step, in 1/255 of the pixel range.
        temperature: τ, by which the teacher's logits are divided.
    """

    temperature: Temperature = 1.0

    needs_classes: ClassVar[bool] = True

    def direction(
        self, pixels: Tensor, teachers: MemberLogits, student: MemberLogits, generator: torch.Generator
    ) -> Tensor:
        """Return equations (1) and (2) in units of η / 255.

        Args:
            pixels: Floating-point inputs before normalization, (B, ...).
            teachers: The teachers' logits as functions of the pixels.
            student: The student's logits as functions of the pixels.
            generator: The generator of random numbers.
        """
        index = int(torch.randint(teachers.num_members, (), generator=generator))
        probs = torch.softmax(teachers.logits(index) / self.temperature, dim=-1)
        w = (2 * torch.rand(probs.shape, generator=generator) - 1).to(probs)
        u = normalise_rms(input_gradient(pixels, [(w * probs).sum()], [None]))  # (1), (2)
        return u * self.scale(probs.detach()).to(u).view(-1, *(1,) * (u.ndim - 1))

    def scale(self, probs: Tensor) -> Tensor:
        """Return the factor on the step of each example: (B, K) -> (B,)."""
        return probs.new_ones(len(probs))
