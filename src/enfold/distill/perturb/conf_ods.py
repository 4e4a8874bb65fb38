"""Confident ODS: output diversified sampling with a step proportional to the teacher's confidence.

    ε = c(x) ε_ODS,   c(x) = max_k softmax(T_m(x) / τ)_k                                               (1)

G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021, arXiv:2110.14149.

At inputs of low confidence a full step could lead to another class, so it is shortened. Random numbers are drawn as
in ODS.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from enfold.arguments import checked
from enfold.distill.loss import Temperature
from enfold.distill.perturb.ods import ODS


@checked
@dataclass(frozen=True)
class ConfODS(ODS):
    """Step as ODS, scaled by the teacher's confidence.

    Args:
        step: η, the root mean square of a step at full confidence, in 1/255 of the pixel range.
        temperature: τ, by which the teacher's logits are divided.
    """

    temperature: Temperature = 1.0

    def scale(self, probs: Tensor) -> Tensor:
        """Return c of equation (1): (B, K) -> (B,)."""
        return probs.amax(dim=-1)
