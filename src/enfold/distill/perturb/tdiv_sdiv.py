"""TDiv-SDiv: inputs move to where two teachers differ more and the two students that learn from them differ less.

    g = ∇_x [D(T_a, T_b) - D(S_a, S_b)],   ε = (η / 255) √D g / ||g||                        (1)

    D:  ce   H[p_b, p_a] = -Σ_k p_b log p_a        ∂D/∂z_a = p_a - p_b                       (2a)
        kl   KL(p_a || p_b)                        ∂D/∂z_a = p_a ∘ (d - p_a·d), d = log p_a - log p_b   (2b)
        js   ½ KL(p_a || m) + ½ KL(p_b || m)       half of (2b) with m = (p_a + p_b) / 2 in p_b's place (2c)

p_b is held fixed: the gradient is that of member a alone. (a, b) are two members drawn for each batch, the same of the
teachers and of the student; with pairs="all" it is the mean over all of them. The gradients are written at the logits
because there they are exactly 0 for equal members, which rounding would otherwise give a direction.

G. Nam, H. Lee, B. Heo, J. Lee: Improving Ensemble Distillation With Weight Averaging and Diversifying Perturbation,
ICML 2022, arXiv:2206.15047.

The moved batch replaces the clean one in the whole loss. Students are asked with their present parameters and their
running batch-norm statistics. KL(p_b || p_a), whose first argument is fixed, has the gradient of "ce"; "kl" is the
other direction.

Differs from the paper: "kl", "js" and all pairs are additions; nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.distill.perturbation import Asked, Perturbation, gradient, unit
from enfold.errors import EnfoldError
from enfold.train.optimize import trained_members

Pairs = Literal["one", "all"]
Divergence = Literal["ce", "kl", "js"]
CHOICES = {"pairs": get_args(Pairs), "divergence": get_args(Divergence)}
LARGEST = 80.0  # of log p_b - log p_a: exp of more than 88 is infinite in float32, and p_a is 0 there


@dataclass(frozen=True)
class TDivSDiv(Perturbation):
    """A step towards disagreement of teachers that students do not show yet."""

    pairs: Pairs = "one"  # one pair of members drawn for each batch, or the mean over all pairs
    divergence: Divergence = "ce"  # what disagreement is: cross-entropy, KL or Jensen-Shannon divergence

    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise EnfoldError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}: choose one"
                )

    def require(self, teachers: nn.Module, student: nn.Module) -> None:
        """As many students as teachers, and two at least."""
        teaching, learning = int(getattr(teachers, "num_members", 1)), trained_members(student)
        if teaching != learning or teaching < 2:
            have = "one network as the student" if learning == 1 else f"{learning} students"
            remedy = f"give a share of {teaching} members" if teaching > 1 else "give more teachers"
            raise EnfoldError(
                "TDiv-SDiv compares two students as it compares their two teachers, so there must be as many of the "
                f"one as of the other and two at least, got {have} and {teaching} teacher{'s' * (teaching > 1)}: "
                f"{remedy}, or use perturb: conf_ods, which asks teachers alone"
            )

    def moves(self, pixels: Tensor, teachers: Asked, student: Asked, source: torch.Generator) -> Tensor:
        """Equation (1) in units of η / 255."""
        pairs = self.drawn(teachers.num_members, source)
        outputs, pulls = [], []
        for asked, sign in ((teachers, 1.0), (student, -1.0)):
            own = {a: asked.logits(a) for a in pairs}
            for a, others in pairs.items():
                one = torch.log_softmax(asked.fixed(a), dim=-1)
                pull = [self.pull(one, torch.log_softmax(asked.fixed(b), dim=-1)) for b in others]
                outputs.append(own[a])
                pulls.append(sign * torch.stack(pull).sum(0).to(own[a]))
        return unit(gradient(pixels, outputs, pulls))  # (1)

    def drawn(self, num_members: int, source: torch.Generator) -> dict[int, list[int]]:
        """The members a that are moved by, each with the members b that it is compared with."""
        if self.pairs == "all":
            return {a: [b for b in range(num_members) if b != a] for a in range(num_members)}
        a = int(torch.randint(num_members, (), generator=source))
        further = int(torch.randint(1, num_members, (), generator=source))
        return {a: [(a + further) % num_members]}

    def pull(self, one: Tensor, other: Tensor) -> Tensor:
        """∂D/∂z_a from log p_a and log p_b, each (B, K)."""
        probs = one.exp()
        if self.divergence == "ce":
            return probs - other.exp()  # (2a)
        if self.divergence == "kl":
            apart = one - other
        else:  # log p_a - log m = -log((1 + p_b / p_a) / 2)
            apart = -torch.log1p(torch.expm1((other - one).clamp(max=LARGEST)) / 2)
        pull = probs * (apart - (probs * apart).sum(-1, keepdim=True))  # (2b)
        return pull if self.divergence == "kl" else pull / 2  # (2c)
