"""One-to-one distillation: M members that share parameters each learn from a teacher of their own.

    L_m = (1 - α) CE(y, p_m) + α τ² KL(t_m(τ) || p_m(τ)),   p(τ) = softmax(z / τ)            (1)
    L   = Σ_m L_m                                                                            (2)

t_m is teacher m and p_m member m of the student, which is a share with as many members: its predictions stay those of
an ensemble, and so does its cost. Without a share given it is a BatchEnsemble; `hydra` first prepares a
body for heads that then learn so.

G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021, arXiv:2110.14149.
L. Tran et al.: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

Published losses are cross-entropies H[t_m, p_m], which differ from (1) by the teachers' own entropy and have the same
gradient. With the teachers' mean as the target of every member, which is `kd` with a share, a BatchEnsemble was
reported to become as good.

Differs from the papers: what members share takes the mean of their gradients, as in any training of a share, so that
(2) is a sum only for what each member owns. In MIMO all slots see the same example. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from enfold.distill.base import Distillation
from enfold.distill.divergence import as_target, divergence
from enfold.distill.teacher import Teacher
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.errors import EnfoldError
from enfold.train.optimize import trained_members


@dataclass(frozen=True)
class OneToOne(Distillation):
    """M members that share parameters, each taught by a teacher of its own."""

    one_network: ClassVar[bool] = False

    def student_share(self, num_teachers: int) -> Any:
        """The share given, or a BatchEnsemble with a member for each teacher."""
        return self.share or partial(BatchEnsemble, num_members=num_teachers, seed=self.plan.seed)

    def check(self, teacher: Teacher, student: nn.Module) -> None:
        """Pairs need as many students as teachers."""
        students = trained_members(student)
        if students != teacher.num_members:
            raise EnfoldError(
                f"each student has a teacher of its own, got {teacher.num_members} teachers and {students} students: "
                f"give a share of {teacher.num_members} members, or use kd, whose students all learn the mean"
            )
        super().check(teacher, student)

    def target(self, logits: Tensor) -> Tensor:
        """t_m(τ) of every teacher, as the divergence takes it: (T, N, C) -> (T, N, C + 1)."""
        return as_target(torch.log_softmax(logits / self.temperature, dim=-1))

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """The second term of (1), a student: logits (S, B, C), target (S, B, K) or, of own batches, (S, S, B, K)."""
        if target.ndim == 4:
            target = target.diagonal(dim1=0, dim2=1).movedim(-1, 0)  # what teacher m says about the batch of student m
        return divergence(logits, target, self.temperature)

    def part(self, target: Tensor, index: int, own: bool) -> Tensor:
        """What a student's own teacher says: (1, B, K), or (1, 1, B, K) of its own batch."""
        one = slice(index, index + 1)
        return target[one, one] if own else target[one]
