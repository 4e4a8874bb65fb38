"""Mixup: convex combinations of pairs of inputs, on which the teachers' outputs are learned.

    x̃_i = λ x_i + (1 - λ) x_π(i),   λ ~ Beta(a, a),   π a permutation, both drawn for each batch       (1)
    labels' term: λ CE(y_i, p_s(x̃_i)) + (1 - λ) CE(y_π(i), p_s(x̃_i))                                   (2)

H. Zhang, M. Cisse, Y. N. Dauphin, D. Lopez-Paz: mixup: Beyond Empirical Risk Minimization, ICLR 2018,
arXiv:1710.09412; for distillation: L. Beyer, X. Zhai, A. Royer, L. Markeeva, R. Anil, A. Kolesnikov: Knowledge
Distillation: A Good Teacher Is Patient and Consistent, CVPR 2022, arXiv:2106.05237.

Teachers and students see the same mixed inputs ("function matching"), so the target is the teachers' output at x̃, and
labels enter only if alpha of the loss is below 1. a = 1, the uniform distribution, is the setting of the second paper.

Differs from the papers: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass


import torch
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.mixing import Mixing


@checked
@dataclass(frozen=True)
class Mixup(Mixing):
    """Replace each input by a convex combination with another input of the batch.

    Args:
        alpha: a, both parameters of the Beta distribution of λ; 1 is uniform, values near 0 mix little.
    """

    def mix(self, inputs: Tensor, partners: Tensor, weight: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return equation (1) and λ."""
        return weight * inputs + (1 - weight) * partners, weight
