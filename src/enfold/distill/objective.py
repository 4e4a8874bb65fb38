"""The objective of a distillation: labels and teachers in one loss for each student.

    L = w_labels · CE(y, p_s(x)) + w_teacher · loss(z_s(x̃), target(z_t(x̃)))                            (1)

x̃ is the batch, or the batch after a perturbation, the same for teachers and students. A perturbation with
`replaces_batch` replaces x in the labels' term, too. Perturbed inputs and targets are computed once for all students.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.distill.loss import DistillationLoss
from enfold.distill.perturbation import LabelMixture, Perturbation
from enfold.distill.teacher import Teacher
from enfold.tasks import Task
from enfold.train.config import PerMember
from enfold.train.objective import Objective, StepContext, TaskLoss, batch_outputs


@dataclass(frozen=True)
class DistillationObjective:
    """Equation (1) as an objective of `fit`.

    Args:
        loss: The distillation loss.
        teacher: The teacher, with the target of that loss.
        perturb: A perturbation of the inputs.
        label_smoothing: Label smoothing in the labels' term, for all students or for each.
    """

    loss: DistillationLoss
    teacher: Teacher
    perturb: Perturbation | None = None
    label_smoothing: PerMember = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each student at the start of the training, (S,)."""
        return self.for_batch(model, batch, StepContext())(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext) -> Objective:
        """Return the objective of one batch: inputs are perturbed and targets computed here."""
        seen, mixture = batch, None
        generator = torch.Generator().manual_seed(context.seed)
        if self.perturb is not None and self.teacher.models is not None:
            seen, mixture = self.perturb.apply(batch, self.teacher.data, self.teacher.models, model, generator)
        labelled = seen if self.perturb is not None and self.perturb.replaces_batch else batch
        kind = SeparableBatchLoss if self.loss.is_separable else BatchLoss
        extra = self.loss.extra_target(self.teacher, seen)
        target, task, chosen = self.teacher.batch_targets(seen, generator)
        return kind(
            self.loss, labelled, seen, target, extra, context.progress, self.label_smoothing, task, chosen, mixture
        )


@dataclass(frozen=True)
class BatchLoss:
    """Equation (1) for one batch."""

    loss: DistillationLoss
    labelled: Batch  # x with the labels
    seen: Batch  # x̃
    target: Tensor
    extra: Tensor | None
    progress: float
    label_smoothing: PerMember
    task: Task  # of the teacher
    chosen: Tensor | None = None  # indices of the rows that are learned; None for all
    mixture: LabelMixture | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each student, (S,)."""
        outputs, loss = self.loss.student_terms(model, self)
        weight, _ = self.loss.weights
        if not weight:
            return loss
        if self.labelled is not self.seen:
            outputs = batch_outputs(model, self.labelled)
        return loss + weight * self._label_loss(outputs)  # (1)

    def student_task(self, outputs: Tensor) -> Task:
        """Return the task of the students, whose heads may differ from the teachers'."""
        return self.task.for_outputs(outputs, self.seen.targets, own=self.seen.own)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the rows of the students that are learned, (S, N, K)."""
        values = self.student_task(outputs).rows(outputs)
        return values if self.chosen is None else values[:, self.chosen]

    def _label_loss(self, outputs: Tensor) -> Tensor:
        loss = TaskLoss(self.student_task(outputs), self.label_smoothing)
        own = loss.of_outputs(outputs, self.labelled)
        if self.mixture is None:
            return own
        axis = int(self.labelled.own)
        partners = replace(self.labelled, targets=self.labelled.targets.index_select(axis, self.mixture.partners))
        return self.mixture.weight * own + (1 - self.mixture.weight) * loss.of_outputs(outputs, partners)


@dataclass(frozen=True)
class SeparableBatchLoss(BatchLoss):
    """A batch loss in which each student's loss depends on that student only: students may run one by one."""

    def member(self, index: int) -> SeparableBatchLoss:
        """Return the loss of one student."""
        seen = self.seen.member(index)
        labelled = seen if self.labelled is self.seen else self.labelled.member(index)
        target = self.loss.select_target(self.target, index, self.seen.own)
        smoothing = self.label_smoothing[index] if isinstance(self.label_smoothing, tuple) else self.label_smoothing
        return replace(self, labelled=labelled, seen=seen, target=target, label_smoothing=smoothing)
