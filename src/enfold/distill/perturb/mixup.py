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

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.batches import Batch
from enfold.distill.perturbation import LabelMixture, Perturbation, require_real
from enfold.errors import EnfoldError


@checked
@dataclass(frozen=True)
class Mixup(Perturbation):
    """Replace each input by a convex combination with another input of the batch.

    Args:
        alpha: a, both parameters of the Beta distribution of λ; 1 is uniform, values near 0 mix little.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    replaces_batch: ClassVar[bool] = True
    num_axes: ClassVar[int] = 1  # the smallest number of axes of the inputs, with the batch axis

    def mix(self, inputs: Tensor, partners: Tensor, weight: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return equation (1), and the weight of the own labels."""
        return weight * inputs + (1 - weight) * partners, weight  # (1)

    def __call__(
        self, inputs: Tensor, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> Tensor:
        """Return the mixed inputs, (B, ...)."""
        return self._draw(inputs, 0, generator)[0]

    def apply(
        self, batch: Batch, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> tuple[Batch, LabelMixture | None]:
        """Return the mixed batch and the mixture of its labels, equation (2); the same for all students."""
        inputs, mixture = self._draw(batch.inputs, int(batch.own), generator)
        return replace(batch, inputs=inputs, indices=None), mixture

    def _draw(self, inputs: Tensor, axis: int, generator: torch.Generator) -> tuple[Tensor, LabelMixture]:
        require_real(inputs)
        if inputs.ndim - axis < self.num_axes:
            raise EnfoldError(
                f"perturb={type(self).__name__}() needs images of shape (B, C, H, W), got "
                f"{tuple(inputs.shape[axis:])}: use Mixup()"
            )
        inputs = inputs.detach()
        order = torch.randperm(inputs.shape[axis], generator=generator).to(inputs.device)
        seed = int(torch.randint(2**62, (), generator=generator))  # torch draws no Beta numbers from a generator
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        mixed, weight = self.mix(inputs, inputs.index_select(axis, order), weight, generator)
        return mixed, LabelMixture(order, weight)
