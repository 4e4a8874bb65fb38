"""One-to-one distillation: each member of an efficient ensemble learns from a teacher of its own.

    L_m = (1 - α) CE(y, p_m) + α τ² KL(t_m(τ) || p_m(τ)),   p(τ) = softmax(z / τ)                      (1)
    L   = Σ_m L_m                                                                                      (2)

t_m is teacher m and p_m member m of the student, an ensemble of as many members: predictions and cost stay those of an
ensemble. Without a student it is a BatchEnsemble of the members' network; `Hydra` prepares a body for heads first.

G. Nam, J. Yoon, Y. Lee, J. Lee: Diversity Matters When Learning From Ensembles, NeurIPS 2021, arXiv:2110.14149.
L. Tran et al.: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

Published losses are cross-entropies H[t_m, p_m], which differ from (1) by the entropy of the teachers and have the same
gradient. With the mean of the teachers as the target of every member, which is `KD` with an ensemble as the student, a
BatchEnsemble was reported to reach the same quality.

Differs from the papers: parameters that members have in common get the mean of their gradients, as in any training of
an efficient ensemble, so that (2) is a sum only for parameters of one member. In MIMO all slots see the same example.
Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.distill.loss import DistillationLoss, Fraction, Temperature
from enfold.distill.losses.common.divergence import as_target, divergence
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.errors import EnfoldError
from enfold.tasks import Task
from enfold.train import TrainConfig
from enfold.train.optimize import trained_members

if TYPE_CHECKING:
    from enfold.distill.teacher import Teacher


@checked
@dataclass(frozen=True)
class OneToOne(DistillationLoss):
    """Match member m of an ensemble to teacher m; the result is an ensemble.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        temperature: τ, by which the logits of teachers and students are divided.
    """

    alpha: Fraction = 1.0
    temperature: Temperature = 1.0

    def target(self, logits: Tensor) -> Tensor:
        """Return t_m(τ) of every teacher with its negative entropy: (T, N, C) -> (T, N, C + 1)."""
        return as_target(torch.log_softmax(logits / self.temperature, dim=-1))

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return the second term of (1): logits (S, B, C), target (S, B, K), or (S, S, B, K) for own batches.

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """
        return divergence(logits, _own_targets(target), self.temperature)

    def task_target(self, values: Tensor, task: Task) -> Tensor:
        """Return t_m(τ) of every teacher, or its distribution for a regression: (T, N, K) -> (T, N, K')."""
        return self.target(values) if task.is_categorical else task.member_targets(values)

    def task_loss(self, values: Tensor, target: Tensor, progress: float, task: Task) -> Tensor:
        """Return the second term of (1), or the divergences of the distributions of a regression.

        Args:
            values: Rows of the students, (S, N, K).
            target: What `task_target` returned for these rows.
            progress: The completed fraction of the training.
            task: The task of the students.
        """
        if task.is_categorical:
            return self.loss(values, target, progress)
        return task.divergence(values, _own_targets(target))

    def select_target(self, target: Tensor, index: int, own: bool) -> Tensor:
        """Return the target of teacher `index`: (1, B, K), or (1, 1, B, K) for own batches.

        Args:
            target: The target of all students.
            index: Index of the student.
            own: Whether each student has its own batch.
        """
        one = slice(index, index + 1)
        return target[one, one] if own else target[one]

    def build_student(self, network: nn.Module, num_teachers: int, config: TrainConfig) -> nn.Module:
        """Return the ensemble that was passed, or a BatchEnsemble with one member per teacher.

        Args:
            network: The network from which the student starts, or the ensemble passed as `student`.
            num_teachers: Number of teachers, T.
            config: The training settings.
        """
        return network if isinstance(network, Ensemble) else BatchEnsemble(network, num_teachers, seed=config.seed)

    def check(self, teacher: Teacher, student: nn.Module, config: TrainConfig) -> None:
        """Require as many students as teachers.

        Args:
            teacher: The teachers.
            student: The student, as it is before the training.
            config: The training settings.
        """
        students = trained_members(student)
        if students != teacher.num_members:
            raise EnfoldError(
                f"loss={type(self).__name__}() needs one student per teacher, got {teacher.num_members} teachers and "
                f"{students} students: pass an ensemble of {teacher.num_members} members as student=, or use KD()"
            )


def _own_targets(target: Tensor) -> Tensor:
    """Return the target of teacher m on the batch of student m: (S, B, K), or (S, S, B, K) for own batches."""
    return target.diagonal(dim1=0, dim2=1).movedim(-1, 0) if target.ndim == 4 else target
