"""Mixup: convex combinations of pairs of inputs, on which the teachers' outputs are learned.

    x̃_i = λ x_i + (1 - λ) x_π(i),   λ ~ Beta(a, a),   π a permutation, both drawn for each batch       (1)
    labels' term: λ CE(y_i, p_s(x̃_i)) + (1 - λ) CE(y_π(i), p_s(x̃_i))                                   (2)

H. Zhang, M. Cisse, Y. N. Dauphin, D. Lopez-Paz: mixup: Beyond Empirical Risk Minimization, ICLR 2018,
arXiv:1710.09412; for distillation: L. Beyer, X. Zhai, A. Royer, L. Markeeva, R. Anil, A. Kolesnikov: Knowledge
Distillation: A Good Teacher Is Patient and Consistent, CVPR 2022, arXiv:2106.05237.

Teachers and students see the same mixed inputs ("function matching"), so the target is the teachers' output at x̃, and
labels enter only if alpha of the loss is below 1. a = 1, the uniform distribution, is the setting of the second paper.
Of inputs that are a tuple or dictionary, all tensors are mixed with the same π and λ; tensors that are not
floating-point, such as token indices, have no convex combination and are refused.

Differs from the papers: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.batches import Batch
from enfold.data.tree import named_tensors
from enfold.distill.perturbation import LabelMixture, Perturbation, real_tensors, replace_real
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
        """Return equation (1), and the weight of the own labels.

        Args:
            inputs: The inputs, (B, ...).
            partners: The inputs to mix them with, (B, ...).
            weight: λ, the weight of `inputs`.
            generator: The generator of random numbers.
        """
        return weight * inputs + (1 - weight) * partners, weight  # (1)

    def __call__(
        self, inputs: Any, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> Any:
        """Return the mixed inputs, (B, ...)."""
        return self._draw(inputs, 0, generator)[0]

    def apply(
        self, batch: Batch, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> tuple[Batch, LabelMixture | None]:
        """Return the mixed batch and the mixture of its labels, equation (2); the same for all students.

        Args:
            batch: The batch.
            data: The training data, which hold the normalization.
            teachers: The teachers.
            student: The student.
            generator: The generator of random numbers.
        """
        inputs, mixture = self._draw(batch.inputs, int(batch.own), generator)
        return replace(batch, inputs=inputs, indices=None), mixture

    def _draw(self, inputs: Any, axis: int, generator: torch.Generator) -> tuple[Any, LabelMixture]:
        named = real_tensors(inputs)
        self._check(inputs, named, axis)
        values = [tensor.detach() for _, tensor in named]
        order = torch.randperm(values[0].shape[axis], generator=generator).to(values[0].device)
        seed = int(torch.randint(2**62, (), generator=generator))  # torch draws no Beta numbers from a generator
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        state = generator.get_state()
        mixed, own = [], weight
        for value in values:
            generator.set_state(state)  # the same rectangle of CutMix in all tensors
            found, own = self.mix(value, value.index_select(axis, order), weight, generator)
            mixed.append(found)
        return replace_real(inputs, mixed), LabelMixture(order, own)

    def _check(self, inputs: Any, named: list[tuple[str, Tensor]], axis: int) -> None:
        """Refuse tensors that cannot be mixed by name."""
        kind = type(self).__name__
        fixed = next(((name, each) for name, each in named_tensors(inputs) if not each.is_floating_point()), None)
        if fixed is not None:
            raise EnfoldError(
                f"perturb={kind}() needs inputs that can be mixed, got {fixed[1].dtype} in '{fixed[0]}': use "
                "Gaussian(), which leaves such inputs unchanged, or perturb=None"
            )
        shapes = [tuple(tensor.shape[axis:]) for _, tensor in named]
        small = next((shape for shape in shapes if len(shape) < self.num_axes), None)
        if small is not None:
            raise EnfoldError(f"perturb={kind}() needs images of shape (B, C, H, W), got {small}: use Mixup()")
        if self.num_axes > 1 and len({shape[-2:] for shape in shapes}) > 1:
            raise EnfoldError(f"perturb={kind}() needs images of one size, got {shapes}: use Mixup()")
