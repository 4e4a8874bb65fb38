"""Knowledge distillation: one network learns to give the ensemble's probabilities.

    L = (1 - α) CE(y, p_s) + α τ² KL(p_t(τ) || p_s(τ)),   p(τ) = softmax(z / τ)              (1)

    p_t(τ):  mean_softened_probs     (1/M) Σ_m softmax(z_m / τ)                              (2a)
             mean_probs_then_soften  softmax(log p̄ / τ),  p̄ = (1/M) Σ_m softmax(z_m)        (2b)
             mean_logits             softmax(z̄ / τ),      z̄ = (1/M) Σ_m z_m                 (2c)

G. Hinton, O. Vinyals, J. Dean: Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531.

The factor τ² keeps the soft gradients at one size whatever τ is. The three teachers agree where the members agree,
and (2a) is (2b) at τ = 1. Published settings differ: α = 0.9 with τ of 3 to 5 is customary for one teacher; α = 1 with
τ = 4 and α = 0.9 with τ = 1 were used for ensembles. The defaults, α = 1 and τ = 1, ask for the ensemble's own
probabilities.

Differs from the paper: the student may start from a member instead of from scratch; nothing else known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.data.dataset import Split, evaluation_batches
from enfold.errors import EnfoldError
from enfold.evaluate import best_member, member_logits
from enfold.folding import require_members
from enfold.members import Members
from enfold.members.initialise import initialised
from enfold.modes import evaluating
from enfold.predictions import mean_log_probs
from enfold.train import Plan, fit
from enfold.train.objective import CrossEntropy, batch_logits

Reduction = Literal["mean_softened_probs", "mean_probs_then_soften", "mean_logits"]
Start = Literal["member", "fresh"]


@dataclass(frozen=True)
class Distill:
    """One network trained on the ensemble's probabilities; `start` is a fresh network or the best member."""

    alpha: float = 1.0
    temperature: float = 1.0
    reduction: Reduction = "mean_softened_probs"
    start: Start = "member"
    plan: Plan = field(default_factory=Plan)
    student: Callable[[], nn.Module] | None = None  # makes another network than the members', started fresh

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise EnfoldError(f"alpha must be in [0, 1], got {self.alpha}: 1 is the ensemble alone, 0 the labels alone")
        if not 0 < self.temperature < math.inf:
            raise EnfoldError(f"the temperature must be above 0, got {self.temperature}: 1 softens nothing")
        for name, choices in (("reduction", get_args(Reduction)), ("start", get_args(Start))):
            if getattr(self, name) not in choices:
                raise EnfoldError(f"the {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def __call__(self, members: Members, data: Data, *, checkpoint: Path | None = None) -> nn.Module:
        """The student after training; the members teach in eval mode and are left as they were."""
        student = self._start(members, data)
        with evaluating(members):
            teacher = Teacher(members, data, self.temperature, self.reduction, cached=not self.plan.augment)
            objective = Distillation(
                teacher, self.alpha, self.temperature, self.plan.per_member("label_smoothing", 1)[0]
            )
            start = self.start if self.student is None else "fresh"
            fit(student, data, self.plan, objective, checkpoint=checkpoint, title=f"distill ({start})")
        return student

    def _start(self, members: Members, data: Data) -> nn.Module:
        if self.student is not None:
            return initialised(self.student, self.plan.seed, -1)[0]
        members = require_members(members, "a student of the members' own class")
        if self.start == "fresh":
            return initialised(members.member(0), self.plan.seed, -1)[0]
        return members.member(best_member(members, data))


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


class Teacher:
    """The members' answer to a batch: looked up where inputs are always the same, computed where they are augmented."""

    def __init__(
        self, members: nn.Module, data: Data, temperature: float, reduction: Reduction, *, cached: bool
    ) -> None:
        self.members, self.temperature, self.reduction = members, temperature, reduction
        self.cache: Tensor | None = None  # (N, C)
        if cached and isinstance(data.train, Split):
            batches = evaluation_batches(data, data.train, 1024)
            self.cache = torch.cat([self._answer(inputs) for inputs, _ in batches])

    @torch.no_grad()
    def _answer(self, inputs: Tensor) -> Tensor:
        device = next(self.members.parameters()).device
        logits = member_logits(self.members, inputs.to(device))
        if not bool(torch.isfinite(logits).all()):
            raise EnfoldError("a teacher's outputs must be finite, got NaN or infinity: look for a diverged member")
        return teacher_log_probs(logits, self.temperature, self.reduction)

    def __call__(self, batch: Batch) -> Tensor:
        """log p_t(τ): (B, C), or (M, B, C) where each student has its own batch."""
        if self.cache is not None and batch.indices is not None:
            found = self.cache[batch.indices]
        elif batch.own:
            found = self._answer(batch.inputs.flatten(0, 1)).view(*batch.labels.shape, -1)
        else:
            found = self._answer(batch.inputs)
        return found.to(batch.labels.device)

    def __repr__(self) -> str:
        """What tells this teacher from another, also in a later process: a checkpoint belongs to one teacher."""
        digest = hashlib.sha256()
        for tensor in self.members.state_dict().values():
            few = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)]
            digest.update(few.cpu().double().numpy().tobytes())
        return f"Teacher({digest.hexdigest()[:16]}, {self.temperature}, {self.reduction})"


@dataclass(frozen=True)
class Distillation:
    """Equation (1) as an objective."""

    teacher: Teacher
    alpha: float
    temperature: float
    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each student, (M,)."""
        target = self.teacher(batch)  # (B, C) or (M, B, C)
        logits = batch_logits(model, batch)  # (M, B, C)
        soft = torch.log_softmax(logits / self.temperature, dim=-1)
        divergence = F.kl_div(soft, target.expand_as(soft), reduction="none", log_target=True)
        loss = self.alpha * self.temperature**2 * divergence.sum(-1).mean(-1)  # (1), second term
        if self.alpha < 1:
            labelled = CrossEntropy(self.label_smoothing).of_logits(logits, batch)
            loss = loss + (1 - self.alpha) * labelled  # (1), first term
        return loss
