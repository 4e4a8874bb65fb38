"""CutMix: a rectangle of each image is replaced by that of another image, and the teachers' outputs are learned there.

    x̃_i = m ∘ x_i + (1 - m) ∘ x_π(i),   m = 0 in a rectangle of the sides √(1 - λ) H and √(1 - λ) W    (1)
    λ ~ Beta(a, a), centre and π uniform; drawn for each batch                                         (2)
    labels' term: λ' CE(y_i, p_s(x̃_i)) + (1 - λ') CE(y_π(i), p_s(x̃_i)),   λ' the mean of m             (3)

S. Yun, D. Han, S. J. Oh, S. Chun, J. Choe, Y. Yoo: CutMix: Regularization Strategy to Train Strong Classifiers with
Localizable Features, ICCV 2019, arXiv:1905.04899; as function matching: L. Beyer, X. Zhai, A. Royer, L. Markeeva,
R. Anil, A. Kolesnikov: Knowledge Distillation: A Good Teacher Is Patient and Consistent, CVPR 2022, arXiv:2106.05237.

Teachers and students see the same inputs; labels enter only if alpha of the loss is below 1. The rectangle is cut off
at the borders of the image, so that λ' may exceed λ.

Differs from the papers: nothing known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.perturb.mixup import Mixup


@checked
@dataclass(frozen=True)
class CutMix(Mixup):
    """Replace a rectangle of each image by that of another image of the batch; inputs are images (B, C, H, W).

    Args:
        alpha: a, both parameters of the Beta distribution of λ; 1 is uniform, values near 0 cut little or nearly all.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    num_axes: ClassVar[int] = 4

    def mix(self, inputs: Tensor, partners: Tensor, weight: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return equation (1) and λ'.

        Args:
            inputs: The inputs, (B, ...).
            partners: The inputs to mix them with, (B, ...).
            weight: λ, the weight of `inputs`.
            generator: The generator of random numbers.
        """
        height, width = inputs.shape[-2:]
        rows, columns = (_interval(size, weight, generator) for size in (height, width))
        mixed = inputs.clone()
        mixed[..., rows, columns] = partners[..., rows, columns]  # (1)
        cut = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed, 1 - cut / (height * width)  # λ' of (3)


def _interval(size: int, weight: float, generator: torch.Generator) -> slice:
    """Return the rows or columns of the rectangle, cut off at the borders."""
    length = int(size * math.sqrt(1 - weight))
    centre = int(torch.randint(size, (), generator=generator))
    return slice(max(centre - length // 2, 0), min(centre + length // 2, size))
