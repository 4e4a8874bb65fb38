"""Confident ODS: output diversified sampling, with steps as long as the teacher is sure of its answer.

    ε = c(x) ε_ODS,   c(x) = max_k softmax(T_m(x) / τ)_k                                     (1)

G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021, arXiv:2110.14149.

Where a teacher is in doubt a whole step could lead to inputs of another class; there it is shortened. The draws are
those of ODS.

Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from enfold.distill.perturb.ods import ODS


@dataclass(frozen=True)
class ConfODS(ODS):
    """ODS scaled by the teacher's confidence."""

    def size(self, probs: Tensor) -> Tensor:
        """c of equation (1): (B, K) -> (B,)."""
        return probs.amax(dim=-1)
