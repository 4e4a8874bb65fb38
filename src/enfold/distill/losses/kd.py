"""Knowledge distillation (KD): a student learns the ensemble's probabilities.

    L = (1 - α) CE(y, p_s) + α τ² KL(p_t(τ) || p_s(τ)),   p(τ) = softmax(z / τ)                        (1)

    p_t(τ):  mean_softened_probs     (1/M) Σ_m softmax(z_m / τ)                                        (2a)
             mean_probs_then_soften  softmax(log p̄ / τ),  p̄ = (1/M) Σ_m softmax(z_m)                  (2b)
             mean_logits             softmax(z̄ / τ),      z̄ = (1/M) Σ_m z_m                           (2c)

The members of a student that is an ensemble each learn (1), fit="members", or their mean does, fit="ensemble":
             p_s(τ) = (1/S) Σ_s softmax(z_s / τ)                                                       (3)

G. Hinton, O. Vinyals, J. Dean: Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531.

The factor τ² keeps the gradients of the soft targets at the same scale for all τ. The three targets are equal if the
members are, and (2a) is (2b) at τ = 1. Published settings differ: α = 0.9 with τ of 3 to 5 is customary for one
teacher; α = 1 with τ = 4 and α = 0.9 with τ = 1 were used for ensembles. The defaults, α = 1 and τ = 1, give the
ensemble's own probabilities as the target.

Differs from the paper: the student may start from a member instead of from scratch, and may be an ensemble, whose
members see the same batches. With weights of the teachers (`fit_weights`), 1/M is w_m. For a regression the target is
the mixture of the teachers' distributions. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.distill.loss import DistillationLoss, Fraction, Temperature
from enfold.distill.losses.common.divergence import as_target, divergence, mean_kl
from enfold.engines.call import pack_inputs
from enfold.engines.outputs import require_classes
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics.weights import Weights, mean_log_probs, weighted_mean
from enfold.tasks import Task
from enfold.train import TrainConfig
from enfold.train.optimize import trained_members

if TYPE_CHECKING:
    from enfold.distill.teacher import Teacher

Reduction = Literal["mean_softened_probs", "mean_probs_then_soften", "mean_logits"]


@checked
@dataclass(frozen=True)
class KD(DistillationLoss):
    """Match the mean of the teachers.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        temperature: τ, by which the logits of teachers and students are divided.
        reduction: The mean of the teachers, equation (2a), (2b) or (2c).
        fit: For a student that is an ensemble: each member matches the target, or the mean of the members does.
    """

    alpha: Fraction = 1.0
    temperature: Temperature = 1.0
    reduction: Reduction = "mean_softened_probs"
    fit: Literal["members", "ensemble"] = "members"

    def target(self, logits: Tensor) -> Tensor:
        """Return p_t(τ) of T teachers with its negative entropy: (T, N, C) -> (N, C + 1)."""
        return as_target(teacher_log_probs(logits, self.temperature, self.reduction))

    def weighted_target(self, values: Tensor, task: Task, weights: tuple[float, ...]) -> Tensor:
        """Return p_t(τ) with w_m in place of 1/M in (2), or the weighted mixture for a regression.

        Args:
            values: Rows of the teachers, (T, N, K).
            task: The task of the teachers.
            weights: Normalized weights of the teachers.
        """
        if not task.is_categorical:
            return task.mixture(values, weights)
        return as_target(teacher_log_probs(values, self.temperature, self.reduction, weights))

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return the second term of (1) for each student; with fit="ensemble" it is the same for all.

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """
        if self.fit == "members":
            return divergence(logits, target, self.temperature)
        soft = mean_log_probs(torch.log_softmax(logits / self.temperature, dim=-1))  # (3)
        return self.temperature**2 * mean_kl(soft, target).expand(len(logits))

    def task_target(self, values: Tensor, task: Task) -> Tensor:
        """Return p_t(τ), or the mixture of the teachers' distributions for a regression."""
        return self.target(values) if task.is_categorical else task.mixture(values)

    def task_loss(self, values: Tensor, target: Tensor, progress: float, task: Task) -> Tensor:
        """Return the second term of (1), or the divergence of the distributions of a regression.

        Args:
            values: Rows of the students, (S, N, K).
            target: What `task_target` returned for these rows.
            progress: The completed fraction of the training.
            task: The task of the students.
        """
        if task.is_categorical:
            return self.loss(values, target, progress)
        if self.fit == "ensemble":
            raise EnfoldError(f"fit must be 'members' for task='{task.name}', got 'ensemble': leave fit out")
        return task.divergence(values, target)

    @property
    def is_separable(self) -> bool:
        """Return whether students are fitted one by one."""
        return self.fit == "members"

    def check(self, teacher: Teacher, student: nn.Module, config: TrainConfig) -> None:
        """Require students that see the same examples if their mean is fitted.

        Args:
            teacher: The teachers.
            student: The student, as it is before the training.
            config: The training settings.
        """
        if self.fit == "ensemble" and trained_members(student) > 1 and config.order != "shared":
            raise EnfoldError(
                f"fit='ensemble' needs students that see the same examples, got order='{config.order}': use an "
                "ensemble that can be trained with order='shared', or fit='members'"
            )

    def evaluated_model(self, student: nn.Module) -> nn.Module:
        """Return what is fitted: the members, or their mean."""
        return student if self.fit == "members" else MeanModel(student)


class MeanModel(nn.Module):
    """The mean of an ensemble, equation (3) at τ = 1, as one network."""

    def __init__(self, ensemble: nn.Module) -> None:
        super().__init__()
        self.ensemble, self.training = ensemble, ensemble.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the log of the mean probabilities: (B, ...) -> (B, C)."""
        outputs = require_classes(member_logits(self.ensemble, pack_inputs(args, kwargs)), "fit='ensemble'")
        return mean_log_probs(torch.log_softmax(outputs, dim=-1))


def teacher_log_probs(logits: Tensor, temperature: float, reduction: Reduction, weights: Weights = None) -> Tensor:
    """Return log p_t(τ) of M teachers, equal or with weights: (M, B, C) -> (B, C).

    Args:
        logits: The teachers' logits, (M, B, C).
        temperature: τ.
        reduction: Whether the mean is over probabilities or over logits.
        weights: Normalized weights of the teachers; None for equal weights.
    """
    if reduction == "mean_softened_probs":
        return mean_log_probs(torch.log_softmax(logits / temperature, dim=-1), weights)  # (2a)
    if reduction == "mean_probs_then_soften":
        mean = mean_log_probs(torch.log_softmax(logits, dim=-1), weights)
        return torch.log_softmax(mean / temperature, dim=-1)  # (2b)
    return torch.log_softmax(weighted_mean(logits, weights) / temperature, dim=-1)  # (2c)
