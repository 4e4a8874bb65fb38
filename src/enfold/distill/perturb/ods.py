"""Output diversified sampling (ODS): inputs move where one teacher's probabilities change in a random direction.

    g = ∇_x w^T softmax(T_m(x) / τ),   w ~ U(-1, 1)^K,   one m for a batch                   (1)
    ε = (η / 255) √D g / ||g||                                                               (2)

Y. Tashiro, Y. Song, S. Ermon: Diversity can be Transferred: Output Diversification for White- and Black-box Attacks,
NeurIPS 2020, arXiv:2003.06878; for distillation: G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From
Ensembles, NeurIPS 2021, arXiv:2110.14149.

A direction drawn for one teacher means something else to the others, so that they disagree more where it leads. Each
example has its own w. Teachers are learned from at the moved inputs, and labels at the clean ones.

Differs from the first paper: one step, by probabilities and not by logits, as in the second. Nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.distill.perturbation import Asked, Perturbation, gradient, unit
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class ODS(Perturbation):
    """A step along the gradient of a random mixture of one teacher's probabilities."""

    temperature: float = 1.0  # τ: the teacher's logits are divided by it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise EnfoldError(f"the temperature must be above 0, got {self.temperature}: 1 softens nothing")

    def moves(self, pixels: Tensor, teachers: Asked, student: Asked, source: torch.Generator) -> Tensor:
        """Equations (1) and (2) in units of η / 255."""
        index = int(torch.randint(teachers.num_members, (), generator=source))
        probs = torch.softmax(teachers.logits(index) / self.temperature, dim=-1)
        w = (2 * torch.rand(probs.shape, generator=source) - 1).to(probs)
        u = unit(gradient(pixels, [(w * probs).sum()], [None]))  # (1), (2)
        return u * self.size(probs.detach()).to(u).view(-1, *(1,) * (u.ndim - 1))

    def size(self, probs: Tensor) -> Tensor:
        """How far each example moves, in steps: (B, K) -> (B,)."""
        return probs.new_ones(len(probs))
