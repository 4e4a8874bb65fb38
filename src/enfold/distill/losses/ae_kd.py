"""AE-KD: distillation with weights on the teachers that make their gradients disagree least, found anew in each batch.

    ℓ_m = τ² KL(p_m(τ) || p_s(τ)),   p(τ) = softmax(z / τ)                                   (1)
    g_m = mean over the batch of ∂ℓ_m/∂z_s = mean of τ (p_s(τ) - p_m(τ))                     (2)
    a   = argmin ½ ||Σ_m a_m g_m||²   subject to   Σ_m a_m = 1,  0 ≤ a_m ≤ C                 (3)
    L   = γ CE(y, p_s) + α Σ_m a_m ℓ_m                                                       (4)

With `normalise`, (3) is of g_m / ||g_m||, and its weights are divided by ||g_m|| and then by their sum.  (5)

With `feature`, the path of a layer, what that layer returns in the student, f_s, learns, too:
    h_m = mean of (f_s - f_m)²,   g_m = mean over the batch of ∂h_m/∂f_s                     (6)
    L   = (4) + β Σ_m b_m h_m,   b by (3) from the gradients of (6)                          (7)

S. Du, S. You, X. Li, J. Wu, F. Wang, C. Qian, C. Zhang: Agree to Disagree: Adaptive Ensemble Knowledge Distillation in
Gradient Space, NeurIPS 2020.

C = 1/M is the mean of the teachers' losses; C = 1 lets a teacher have all the weight. One teacher has it in any case.
Published settings: 240 epochs of SGD with batches of 64 and a rate of 0.05, a tenth of it after 150, 180 and 210 each.

Differs from the paper: (3) is solved exactly instead of by a one-class support vector machine. Features are compared as
they are, without layers in between that are learned for each teacher, so those of student and teachers have one shape.
The published code has no β but 0, adds the last term of (7) from the second epoch on, and normalises its gradients in
any case; here it is there from the first epoch on, and `normalise` holds for both. The student may start from a member,
and may be a share, whose members have weights of their own. Nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.distill.base import Distillation
from enfold.distill.hints import Hints, require_features
from enfold.distill.lesson import Lessons
from enfold.distill.simplex import capped_simplex_weights, require_cap
from enfold.distill.teacher import Teacher
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class AEKD(Distillation):
    """One network, or a share of it, taught by the members with adaptive weights."""

    alpha: float = 0.9  # the teachers' part of the loss
    temperature: float = 4.0  # teachers' and students' logits are divided by it
    hard: float = 1.0  # γ, the labels' part of the loss
    tolerance: float = 0.6  # C, the largest weight of one teacher, from 1/M (all equal) to 1
    normalise: bool = False  # whether gradients have length 1 when weights are sought
    feature: str | None = None  # the path of a layer whose outputs are learned, too
    beta: float = 1.0  # the features' part of the loss

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hard", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise EnfoldError(f"{name} must be 0 or more, got {getattr(self, name)}: 1 is usual")
        if not 0 < self.tolerance <= 1:
            raise EnfoldError(
                f"the tolerance must be in [1/M, 1], got {self.tolerance}: 1/M weighs all teachers alike, 0.6 is usual"
            )

    @property
    def weights(self) -> tuple[float, float]:
        """γ and α of equation (4)."""
        return self.hard, self.alpha

    def check(self, teacher: Teacher, student: nn.Module) -> None:
        """The tolerance must leave room for weights, and a hint must be a layer of all."""
        super().check(teacher, student)
        if teacher.num_members > 1:
            require_cap(self.tolerance, teacher.num_members, "tolerance")
        if self.feature is not None:
            require_features(teacher, student, self.feature)

    def lessons(self, teacher: Teacher) -> Lessons:
        """Lessons with a hint, if there is one."""
        plain = super().lessons(teacher)
        if self.feature is None:
            return plain
        return Hints(self, teacher, plain.perturb, plain.label_smoothing, path=self.feature, weight=self.beta)

    def target(self, logits: Tensor) -> Tensor:
        """log p_m(τ) of each teacher: (T, N, C) -> (T, N, C)."""
        return torch.log_softmax(logits / self.temperature, dim=-1)

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Σ_m a_m ℓ_m of equation (4), of each student."""
        soft = torch.log_softmax(logits / self.temperature, dim=-1)  # (S, B, C)
        teachers = target if target.ndim == 4 else target[:, None]  # (T, S or 1, B, C)
        losses = F.kl_div(soft, teachers, reduction="none", log_target=True).sum(-1).mean(-1)  # (T, S)
        gradients = self.temperature * (soft.exp() - teachers.exp()).mean(2)  # (2): (T, S, C)
        return self.temperature**2 * (self.teacher_weights(gradients) * losses).sum(0)  # (1), (4)

    def hint_loss(self, given: Tensor, wanted: Tensor) -> Tensor:
        """Σ_m b_m h_m of equation (7), of each student, from features (S, B, ...) and (T, [S,] B, ...)."""
        students = given.flatten(2)  # (S, B, D)
        teachers = wanted.flatten(2)[:, None] if wanted.ndim == given.ndim else wanted.flatten(3)  # (T, S or 1, B, D)
        differences = students - teachers
        gradients = 2 * differences.mean(2) / differences.shape[-1]  # (6): (T, S, D)
        return (self.teacher_weights(gradients) * differences.square().mean((2, 3))).sum(0)  # (7)

    @torch.no_grad()
    def teacher_weights(self, gradients: Tensor) -> Tensor:
        """Equation (3), or (5), for each student: (T, S, D) -> (T, S)."""
        # A diverged student is for the training loop to tell of, by its loss, which is not touched here.
        vectors = gradients.double().nan_to_num(0.0, 0.0, 0.0).movedim(0, 1)  # (S, T, D)
        norms = vectors.norm(dim=-1)  # (S, T)
        norms = norms.clamp(min=1e-12 * float(norms.max().clamp(min=1e-200)))  # 0 divided by itself is no weight
        if self.normalise:
            vectors = vectors / norms[..., None]
        cap = max(self.tolerance, 1 / vectors.shape[1])  # of one teacher
        found = torch.stack([capped_simplex_weights(each @ each.T, cap) for each in vectors])  # (3)
        if self.normalise:
            found = found / norms  # (5)
            found = found / found.sum(-1, keepdim=True)
        return found.T.to(gradients)
