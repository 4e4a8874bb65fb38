"""Lessons: a distillation's loss as an objective for `fit`.

    L = a · labels(clean inputs) + b · teachers(taught inputs)                               (1)

What is taught is the batch, or the batch moved by a perturbation; one that `replaces` the batch has its labels learned
there too. What is the same for all members, the moved inputs and the teachers' answers, is computed once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.distill.perturbation import Perturbation
from enfold.distill.teacher import Teacher
from enfold.train.config import PerMember
from enfold.train.objective import CrossEntropy, Objective, StepContext, batch_logits


class Subject(Protocol):
    """What a method says about its loss."""

    @property
    def separable(self) -> bool:
        """Whether a student's loss depends on that student alone."""

    @property
    def weights(self) -> tuple[float, float]:
        """a and b of equation (1)."""

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """(S, B, C) of S students, and the target (..., B, K), or (..., S, B, K) of own batches -> (S,)."""

    def part(self, target: Tensor, index: int, own: bool) -> Tensor:
        """The part of a target that one student's loss needs, shaped as for one student."""


@dataclass(frozen=True)
class Lessons:
    """Equation (1) as an objective: each batch becomes a lesson."""

    subject: Subject
    teacher: Teacher
    perturb: Perturbation | None = None
    label_smoothing: PerMember = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each student, (S,), at the start of a training."""
        return self.for_batch(model, batch, StepContext())(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, moment: StepContext) -> Objective:
        """The lesson of one batch."""
        taught = batch if self.perturb is None else self._moved(model, batch, moment)
        kind = SeparableLesson if self.subject.separable else Lesson
        clean = taught if self.perturb is not None and self.perturb.replaces else batch
        return kind(self.subject, clean, taught, self.teacher(taught), moment.progress, self.label_smoothing)

    def _moved(self, model: nn.Module, batch: Batch, moment: StepContext) -> Batch:
        if self.perturb is None or self.teacher.members is None:
            raise TypeError("a perturbation needs members to ask")
        source = torch.Generator().manual_seed(moment.seed)
        inputs = batch.inputs.flatten(0, 1) if batch.own else batch.inputs
        moved = self.perturb(inputs, self.teacher.data, self.teacher.members, model, source)
        return replace(batch, inputs=moved.view_as(batch.inputs), indices=None)  # nobody has answers for these


@dataclass(frozen=True)
class Lesson:
    """What one batch teaches."""

    subject: Subject
    clean: Batch
    taught: Batch
    target: Tensor
    progress: float
    label_smoothing: PerMember

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each student, (S,)."""
        hard, _ = self.subject.weights
        logits, loss = self.teaching(model)
        if not hard:
            return loss
        if self.clean is not self.taught:
            logits = batch_logits(model, self.clean)
        return loss + hard * CrossEntropy(self.label_smoothing).of_logits(logits, self.clean)  # (1), first term

    def teaching(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The students' logits on what is taught, (S, B, C), and the second term of (1), (S,)."""
        logits, weight = batch_logits(model, self.taught), self.subject.weights[1]
        loss = self.subject.loss(logits, self.target, self.progress)
        return logits, loss if weight == 1 else weight * loss


@dataclass(frozen=True)
class SeparableLesson(Lesson):
    """A lesson in which each student learns alone, so that students may be run one after the other."""

    def member(self, index: int) -> SeparableLesson:
        """What one student learns."""
        taught = self.taught.member(index)
        clean = taught if self.clean is self.taught else self.clean.member(index)
        target = self.subject.part(self.target, index, self.taught.own)
        smoothing = self.label_smoothing[index] if isinstance(self.label_smoothing, tuple) else self.label_smoothing
        return replace(self, clean=clean, taught=taught, target=target, label_smoothing=smoothing)
