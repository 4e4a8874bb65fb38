"""Knowledge distillation: one network learns to give the ensemble's probabilities.

    L = (1 - α) CE(y, p_s) + α τ² KL(p_t(τ) || p_s(τ)),   p(τ) = softmax(z / τ)              (1)

    p_t(τ):  mean_softened_probs     (1/M) Σ_m softmax(z_m / τ)                              (2a)
             mean_probs_then_soften  softmax(log p̄ / τ),  p̄ = (1/M) Σ_m softmax(z_m)        (2b)
             mean_logits             softmax(z̄ / τ),      z̄ = (1/M) Σ_m z_m                 (2c)

A share learns this member by member (fit="members"), or by the mean of its members:
             p_s(τ) = (1/S) Σ_s softmax(z_s / τ)                                             (3)

G. Hinton, O. Vinyals, J. Dean: Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531.

The factor τ² keeps the soft gradients at one size whatever τ is. The three teachers agree where the members agree,
and (2a) is (2b) at τ = 1. Published settings differ: α = 0.9 with τ of 3 to 5 is customary for one teacher; α = 1 with
τ = 4 and α = 0.9 with τ = 1 were used for ensembles. The defaults, α = 1 and τ = 1, ask for the ensemble's own
probabilities.

Differs from the paper: the student may start from a member instead of from scratch, and may be a share, whose members
see the same batches; nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.distill.base import Distillation
from enfold.distill.divergence import as_target, divergence, divergence_from
from enfold.distill.teacher import Teacher
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics.predictions import mean_log_probs
from enfold.train.optimize import trained_members

Reduction = Literal["mean_softened_probs", "mean_probs_then_soften", "mean_logits"]
Fitted = Literal["members", "ensemble"]


@dataclass(frozen=True)
class KD(Distillation):
    """One network, or a share of it, trained on the ensemble's probabilities."""

    reduction: Reduction = "mean_softened_probs"  # which mean of the teachers
    fit: Fitted = "members"  # of a share: each member is to be like the teachers' mean, or only their own mean

    def target(self, logits: Tensor) -> Tensor:
        """p_t(τ) of T teachers, as the divergence takes it: (T, N, C) -> (N, C + 1)."""
        return as_target(teacher_log_probs(logits, self.temperature, self.reduction))

    @property
    def separable(self) -> bool:
        """Unless it is the students' mean that learns."""
        return self.fit == "members"

    def check(self, teacher: Teacher, student: nn.Module) -> None:
        """A mean of students is a mean of what they say about the same examples."""
        super().check(teacher, student)
        order = self.trained_by(student).order
        if self.fit == "ensemble" and trained_members(student) > 1 and order != "shared":
            raise EnfoldError(
                f"fit: ensemble needs students that see the same examples, got the order '{order}': use a share that "
                "can be trained with order: shared, or fit: members"
            )

    def judged(self, student: nn.Module) -> nn.Module:
        """What is fitted: the students one by one, or their mean."""
        return student if self.fit == "members" else MeanOf(student)

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """The second term of equation (1), of each student; of their mean (3), it is the same for all."""
        if self.fit == "members":
            return divergence(logits, target, self.temperature)
        soft = mean_log_probs(torch.log_softmax(logits / self.temperature, dim=-1))  # (3)
        return self.temperature**2 * divergence_from(soft, target).expand(len(logits))


class MeanOf(nn.Module):
    """The mean (3) of members at τ = 1, as one network."""

    def __init__(self, members: nn.Module) -> None:
        super().__init__()
        self.members, self.training = members, members.training

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        return mean_log_probs(torch.log_softmax(member_logits(self.members, inputs), dim=-1))


def teacher_log_probs(logits: Tensor, temperature: float, reduction: Reduction) -> Tensor:
    """log p_t(τ) of M teachers: (M, B, C) -> (B, C)."""
    if reduction == "mean_softened_probs":
        return mean_log_probs(torch.log_softmax(logits / temperature, dim=-1))  # (2a)
    if reduction == "mean_probs_then_soften":
        mean = mean_log_probs(torch.log_softmax(logits, dim=-1))
        return torch.log_softmax(mean / temperature, dim=-1)  # (2b)
    if reduction == "mean_logits":
        return torch.log_softmax(logits.mean(0) / temperature, dim=-1)  # (2c)
    raise EnfoldError(
        f"the reduction must be mean_softened_probs, mean_probs_then_soften or mean_logits, got {reduction!r}"
    )
