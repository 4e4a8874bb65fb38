"""AE-KD: distillation with weights of the teachers for which their gradients conflict least, solved for each batch.

    ℓ_m = τ² KL(p_m(τ) || p_s(τ)),   p(τ) = softmax(z / τ)                                             (1)
    g_m = mean over the batch of ∂ℓ_m/∂z_s = mean of τ (p_s(τ) - p_m(τ))                               (2)
    a   = argmin ½ ||Σ_m a_m g_m||²   subject to   Σ_m a_m = 1,  0 ≤ a_m ≤ C                           (3)
    L   = γ CE(y, p_s) + α Σ_m a_m ℓ_m                                                                 (4)

With `normalise`, (3) is of g_m / ||g_m||, and its weights are divided by ||g_m|| and then by their sum.  (5)

With `feature`, the path of a layer, the output f_s of that layer in the student is learned, too:
    h_m = mean of (f_s - f_m)²,   g_m = mean over the batch of ∂h_m/∂f_s                               (6)
    L   = (4) + β Σ_m b_m h_m,   b by (3) from the gradients of (6)                                    (7)

S. Du, S. You, X. Li, J. Wu, F. Wang, C. Qian, C. Zhang: Agree to Disagree: Adaptive Ensemble Knowledge Distillation in
Gradient Space, NeurIPS 2020.

C = 1/M is the mean of the teachers' losses; C = 1 lets one teacher have the complete weight. Published settings: 240
epochs of SGD with batches of 64 and a rate of 0.05, divided by 10 after 150, 180 and 210 epochs.

Differs from the paper: (3) is solved exactly instead of by a one-class support vector machine. Features are compared
directly, without learned layers in between, so those of student and teachers have one shape. The published code has
β = 0 only, adds the last term of (7) from the second epoch on, and always normalises its gradients; here it is added
from the first epoch on, and `normalise` applies to both. The student may start from a member, and may be an ensemble,
whose members have weights of their own. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.batches import Batch
from enfold.data.tree import device_of
from enfold.distill.loss import DistillationLoss, Fraction, Temperature, Weight
from enfold.distill.losses.common.features import check_features, outputs_and_features, teacher_features
from enfold.distill.losses.common.simplex import capped_simplex_weights, require_cap
from enfold.train import TrainConfig

if TYPE_CHECKING:
    from enfold.distill.objective import BatchLoss
    from enfold.distill.teacher import Teacher


@checked
@dataclass(frozen=True)
class AEKD(DistillationLoss):
    """Match all teachers, with adaptive weights.

    Args:
        alpha: α, weight of the teachers' term.
        temperature: τ, by which the logits of teachers and students are divided.
        hard: γ, weight of the labels' term.
        tolerance: C, the largest weight of one teacher, from 1/M (equal weights) to 1.
        normalise: Whether gradients are normalised before the weights are computed.
        feature: Path of a layer whose output is learned, too.
        beta: β, weight of the features' term.
    """

    alpha: Fraction = 0.9
    temperature: Temperature = 4.0
    hard: Weight = 1.0
    tolerance: Annotated[float, Field(gt=0, le=1)] = 0.6
    normalise: bool = False
    feature: str | None = None
    beta: Weight = 1.0

    def target(self, logits: Tensor) -> Tensor:
        """Return log p_m(τ) of each teacher: (T, N, C) -> (T, N, C)."""
        return torch.log_softmax(logits / self.temperature, dim=-1)

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return Σ_m a_m ℓ_m of equation (4) for each student.

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """
        soft = torch.log_softmax(logits / self.temperature, dim=-1)  # (S, B, C)
        teachers = target if target.ndim == 4 else target[:, None]  # (T, S or 1, B, C)
        losses = F.kl_div(soft, teachers, reduction="none", log_target=True).sum(-1).mean(-1)  # (T, S)
        gradients = self.temperature * (soft.exp() - teachers.exp()).mean(2)  # (2): (T, S, C)
        return self.temperature**2 * (self.teacher_weights(gradients) * losses).sum(0)  # (1), (4)

    def feature_loss(self, students: Tensor, teachers: Tensor) -> Tensor:
        """Return Σ_m b_m h_m of equation (7) for each student, from features (S, B, ...) and (T, [S,] B, ...)."""
        if teachers.ndim == students.ndim:
            teachers = teachers[:, None]
        differences = students.flatten(2) - teachers.flatten(3)  # (T, S, B, D)
        gradients = 2 * differences.mean(2) / differences.shape[-1]  # (6): (T, S, D)
        return (self.teacher_weights(gradients) * differences.square().mean((2, 3))).sum(0)  # (7)

    @torch.no_grad()
    def teacher_weights(self, gradients: Tensor) -> Tensor:
        """Return equation (3), or (5), for each student: (T, S, D) -> (T, S)."""
        # A diverged student is reported by the training loop, which checks its loss.
        vectors = gradients.double().nan_to_num(0.0, 0.0, 0.0).movedim(0, 1)  # (S, T, D)
        norms = vectors.norm(dim=-1)  # (S, T)
        norms = norms.clamp(min=1e-12 * float(norms.max().clamp(min=1e-200)))  # 0 / 0 is not a weight
        if self.normalise:
            vectors = vectors / norms[..., None]
        cap = max(self.tolerance, 1 / vectors.shape[1])  # of one teacher
        found = torch.stack([capped_simplex_weights(each @ each.T, cap) for each in vectors])  # (3)
        if self.normalise:
            found = found / norms  # (5)
            found = found / found.sum(-1, keepdim=True)
        return found.T.to(gradients)

    @property
    def weights(self) -> tuple[float, float]:
        """γ and α of equation (4)."""
        return self.hard, self.alpha

    @property
    def is_separable(self) -> bool:
        """Return whether students may run one by one; features are recorded for all at once."""
        return self.feature is None

    def check(self, teacher: Teacher, student: nn.Module, config: TrainConfig) -> None:
        """Require a tolerance that M weights can have, and a layer with features of one shape.

        Args:
            teacher: The teachers.
            student: The student, as it is before the training.
            config: The training settings.
        """
        if teacher.num_members > 1:
            require_cap(self.tolerance, teacher.num_members, "tolerance")
        if self.feature is not None:
            check_features(teacher, student, self.feature)

    def extra_target(self, teacher: Teacher, batch: Batch) -> Tensor | None:
        """Return the teachers' features, (T, B, ...) or (T, S, B, ...); None without `feature`."""
        if self.feature is None:
            return None
        inputs = batch.inputs.flatten(0, 1) if batch.own else batch.inputs
        features = teacher_features(teacher, inputs, self.feature).to(device_of(batch.inputs))
        return features.unflatten(1, batch.inputs.shape[:2]) if batch.own else features

    def student_terms(self, model: nn.Module, step: BatchLoss) -> tuple[Tensor, Tensor]:
        """Return the students' outputs and the last two terms of (7)."""
        if self.feature is None or step.extra is None:
            return super().student_terms(model, step)
        outputs, features = outputs_and_features(model, step.seen, self.feature)
        loss = self.alpha * self.task_loss(step.rows(outputs), step.target, step.progress, step.student_task(outputs))
        return outputs, loss + self.beta * self.feature_loss(features, step.extra)
