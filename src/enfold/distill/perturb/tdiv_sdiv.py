"""TDiv-SDiv: a step towards inputs where two teachers differ more and the two students that learn from them less.

    g = ∇_x [D(T_a, T_b) - D(S_a, S_b)],   ε = (η / 255) √D g / ||g||                                  (1)

    D:  ce   H[p_b, p_a] = -Σ_k p_b log p_a        ∂D/∂z_a = p_a - p_b                                 (2a)
        kl   KL(p_a || p_b)                        ∂D/∂z_a = p_a ∘ (d - p_a·d), d = log p_a - log p_b  (2b)
        js   ½ KL(p_a || m) + ½ KL(p_b || m)       half of (2b) with m = (p_a + p_b) / 2 for p_b       (2c)

p_b is detached: the gradient is that of member a. (a, b) are two members drawn for each batch, the same of teachers and
student; pairs="all" takes the mean over all of them. Gradients are written at the logits because there they are
exactly 0 for equal members, for which rounding would otherwise give a direction.

G. Nam, H. Lee, B. Heo, J. Lee: Improving Ensemble Distillation With Weight Averaging and Diversifying Perturbation,
ICML 2022, arXiv:2206.15047.

The perturbed batch replaces the clean one in the complete loss. Students run with their current parameters and their
running batch-norm statistics. KL(p_b || p_a), whose first argument is detached, has the gradient of "ce"; "kl" is the
other direction.

Differs from the paper: "kl", "js" and all pairs are additions; nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.distill.perturbation import MemberLogits, PixelStep, input_gradient, normalise_rms
from enfold.distill.teacher import count_members
from enfold.errors import EnfoldError
from enfold.train.optimize import trained_members

Pairs = Literal["one", "all"]
Divergence = Literal["ce", "kl", "js"]
LARGEST = 80.0  # of log p_b - log p_a: exp of more than 88 is infinite in float32, and p_a is 0 there


@checked
@dataclass(frozen=True)
class TDivSDiv(PixelStep):
    """Step towards disagreement of the teachers that the students do not have yet.

    The student must have as many members as the teacher, at least two.

    Args:
        step: η, the root mean square of a step, in 1/255 of the pixel range.
        pairs: One pair of members drawn for each batch, or the mean over all pairs.
        divergence: The measure of disagreement: cross-entropy, KL or Jensen-Shannon divergence.
    """

    pairs: Pairs = "one"
    divergence: Divergence = "ce"

    replaces_batch: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True

    def check(self, teachers: nn.Module, student: nn.Module) -> None:
        """Require as many students as teachers, and at least two."""
        num_teachers, num_students = count_members(teachers), trained_members(student)
        if num_teachers != num_students or num_teachers < 2:
            remedy = f"pass an ensemble of {num_teachers} members as student=" if num_teachers > 1 else "add teachers"
            raise EnfoldError(
                f"perturb=TDivSDiv() needs as many students as teachers and at least two, got {num_students} students "
                f"and {num_teachers} teachers: {remedy}, or use ConfODS(), which needs the teachers only"
            )

    def direction(
        self, pixels: Tensor, teachers: MemberLogits, student: MemberLogits, generator: torch.Generator
    ) -> Tensor:
        """Return equation (1) in units of η / 255.

        Args:
            pixels: Floating-point inputs before normalization, (B, ...).
            teachers: The teachers' logits as functions of the pixels.
            student: The student's logits as functions of the pixels.
            generator: The generator of random numbers.
        """
        pairs = self.draw_pairs(teachers.num_members, generator)
        outputs, weights = [], []
        for model, sign in ((teachers, 1.0), (student, -1.0)):
            own = {a: model.logits(a) for a in pairs}
            for a, others in pairs.items():
                one = torch.log_softmax(model.constant_logits(a), dim=-1)
                slopes = [self.slope(one, torch.log_softmax(model.constant_logits(b), dim=-1)) for b in others]
                outputs.append(own[a])
                weights.append(sign * torch.stack(slopes).sum(0).to(own[a]))
        return normalise_rms(input_gradient(pixels, outputs, weights))  # (1)

    def draw_pairs(self, num_members: int, generator: torch.Generator) -> dict[int, list[int]]:
        """Return the members a, each with the members b that it is compared with."""
        if self.pairs == "all":
            return {a: [b for b in range(num_members) if b != a] for a in range(num_members)}
        a = int(torch.randint(num_members, (), generator=generator))
        offset = int(torch.randint(1, num_members, (), generator=generator))
        return {a: [(a + offset) % num_members]}

    def slope(self, one: Tensor, other: Tensor) -> Tensor:
        """Return ∂D/∂z_a from log p_a and log p_b, each (B, K)."""
        probs = one.exp()
        if self.divergence == "ce":
            return probs - other.exp()  # (2a)
        if self.divergence == "kl":
            difference = one - other
        else:  # log p_a - log m = -log((1 + p_b / p_a) / 2)
            difference = -torch.log1p(torch.expm1((other - one).clamp(max=LARGEST)) / 2)
        slope = probs * (difference - (probs * difference).sum(-1, keepdim=True))  # (2b)
        return slope if self.divergence == "kl" else slope / 2  # (2c)
