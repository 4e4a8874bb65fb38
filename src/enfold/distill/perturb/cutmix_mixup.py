"""CutMix or mixup, drawn for each batch: the student sees rectangles of other images as well as convex combinations.

    x̃ = CutMix(x) with probability 1/2, else mixup(x)                                                  (1)

R. Wightman, H. Touvron, H. Jégou: ResNet Strikes Back: An Improved Training Procedure in timm, 2021, arXiv:2110.00476,
for training on labels; here teachers and students see the same inputs, as with each of the two.

Differs from the paper: both have the same parameter a of the Beta distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.perturb.cutmix import CutMix
from enfold.distill.perturb.mixup import Mixup


@checked
@dataclass(frozen=True)
class CutMixMixup(CutMix):
    """Change each batch by `CutMix` or by `Mixup`, with equal probability; inputs are images (B, C, H, W).

    Args:
        alpha: a, both parameters of the Beta distribution of λ; 1 is uniform, values near 0 mix little.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def mix(self, inputs: Tensor, partners: Tensor, weight: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return the mixed inputs of equation (1), and the weight of the own labels.

        Args:
            inputs: The inputs, (B, ...).
            partners: The inputs to mix them with, (B, ...).
            weight: λ, the weight of `inputs`.
            generator: The generator of random numbers.
        """
        kind = CutMix if torch.rand((), generator=generator) < 0.5 else Mixup  # (1)
        return kind.mix(self, inputs, partners, weight, generator)
