"""What Mixup and CutMix have in common: each example is combined with a partner of the same batch."""
# No `from __future__ import annotations`: the types of inherited fields are then values, which need no import elsewhere.

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.distill.perturbation import LabelMixture, Perturbation, require_real
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Mixing(Perturbation):
    """A perturbation by pairs of examples; labels are mixed with the same partners and weight.

    Args:
        alpha: Both parameters of the Beta distribution from which the weight of the own example is drawn.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    replaces_batch: ClassVar[bool] = True
    num_axes: ClassVar[int] = 1  # the smallest number of axes of the inputs, with the batch axis

    @abstractmethod
    def mix(self, inputs: Tensor, partners: Tensor, weight: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return the mixed inputs, and the weight of the own labels."""

    def __call__(
        self, inputs: Tensor, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> Tensor:
        """Return the mixed inputs, (B, ...)."""
        return self._mixed(inputs, 0, generator)[0]

    def apply(
        self, batch: Batch, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> tuple[Batch, LabelMixture | None]:
        """Return the mixed batch and the mixture of its labels; the same for all students with batches of their own."""
        inputs, mixture = self._mixed(batch.inputs, int(batch.own), generator)
        return replace(batch, inputs=inputs, indices=None), mixture

    def _mixed(self, inputs: Tensor, axis: int, generator: torch.Generator) -> tuple[Tensor, LabelMixture]:
        require_real(inputs)
        if inputs.ndim - axis < self.num_axes:
            raise EnfoldError(
                f"perturb={type(self).__name__}() needs images of shape (B, C, H, W), got {tuple(inputs.shape[axis:])}: "
                "use Mixup()"
            )
        inputs = inputs.detach()
        order = torch.randperm(inputs.shape[axis], generator=generator).to(inputs.device)
        seed = int(torch.randint(2**62, (), generator=generator))  # torch draws no Beta numbers from a generator
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        mixed, weight = self.mix(inputs, inputs.index_select(axis, order), weight, generator)
        return mixed, LabelMixture(order, weight)
