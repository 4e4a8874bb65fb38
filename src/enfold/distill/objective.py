"""The objective of a distillation: labels and teachers in one loss for each student.

    L = w_labels · CE(y, p_s(x)) + w_teacher · loss(z_s(x̃), target(z_t(x̃)))                            (1)

x̃ is the batch, or the batch after a perturbation, the same for teachers and students. A perturbation with
`replaces_batch` replaces x in the labels' term, too. Perturbed inputs and targets are computed once for all students.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.data.dataset import Part, evaluation_batches
from enfold.data.tree import to_device
from enfold.distill.loss import DistillationLoss
from enfold.distill.perturbation import LabelMixture, Perturbation
from enfold.distill.teacher import BatchTargets, Teacher
from enfold.engines.modes import eval_mode
from enfold.tasks import StudentTask, Task, current_task
from enfold.train.config import PerMember
from enfold.train.objective import StepContext, TaskLoss, batch_outputs

EXAMPLES = 1024  # in a forward pass without gradients


@dataclass(frozen=True)
class DistillationObjective:
    """Equation (1) as an objective of `fit`.

    Args:
        loss: The distillation loss.
        teacher: The teacher, with the target of that loss.
        perturb: A perturbation of the inputs.
        label_smoothing: Label smoothing in the labels' term, for all students or for each.
        student_task: The task of the students, which follows from their outputs, as heads may differ.
    """

    loss: DistillationLoss
    teacher: Teacher
    perturb: Perturbation | None = None
    label_smoothing: PerMember = 0.0
    student_task: StudentTask = field(default_factory=StudentTask, repr=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each student at the start of the training, (S,)."""
        return self.for_batch(model, batch, StepContext())(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext) -> BatchLoss:
        """Return the objective of one batch: inputs are perturbed and targets computed here.

        Args:
            model: The students.
            batch: The batch.
            context: Epoch, progress and seed of the step.
        """
        seen, mixture = batch, None
        generator = torch.Generator().manual_seed(context.seed)
        if self.perturb is not None and self.teacher.models is not None:
            self.perturb.check_task(current_task(self.teacher.task))
            seen, mixture = self.perturb.apply(batch, self.teacher.data, self.teacher.models, model, generator)
        labelled = seen if self.perturb is not None and self.perturb.replaces_batch else batch
        kind = SeparableBatchLoss if self.loss.is_separable else BatchLoss
        extra = self.loss.extra_target(self.teacher, seen)
        found = self.teacher.batch_targets(seen, generator)
        if self.perturb is not None:
            self.perturb.check_task(found.task)  # which may be known from this batch on
        return kind(
            self.loss,
            labelled,
            seen,
            found,
            extra,
            context.progress,
            self.label_smoothing,
            self.student_task,
            mixture,
        )

    @torch.no_grad()
    def divergence(self, model: nn.Module, part: Part) -> list[float]:
        """Return the teachers' term of each student for examples without targets, in eval mode.

        Args:
            model: The students.
            part: Examples, such as those of validation.
        """
        total, count = torch.zeros(()), 0
        clean = replace(self, perturb=None)
        with eval_mode(model):
            device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
            for inputs, targets, _ in evaluation_batches(part, EXAMPLES):
                batch = Batch(to_device(inputs, device), targets)
                step = clean.for_batch(model, batch, StepContext(progress=1.0))
                _, losses = self.loss.student_terms(model, step)
                total = total + len(batch) * losses.cpu().double()
                count += len(batch)
        found: list[float] = (total / max(count, 1)).tolist()
        return found


@dataclass(frozen=True)
class BatchLoss:
    """Equation (1) for one batch."""

    loss: DistillationLoss
    labelled: Batch  # x with the labels
    seen: Batch  # x̃
    targets: BatchTargets  # what is learned about x̃
    extra: Tensor | None
    progress: float
    label_smoothing: PerMember
    students: StudentTask
    mixture: LabelMixture | None = None

    @property
    def target(self) -> Tensor:
        """The targets computed from the teachers, (..., N, K)."""
        return self.targets.target

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
        return self.students.resolve_for(self.targets.task, outputs, self.targets.labels, own=self.seen.own)

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the rows of the students that are learned, (S, N, K)."""
        values = self.student_task(outputs).rows(outputs)
        return values if self.targets.chosen is None else values[:, self.targets.chosen]

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
        targets = self.targets._replace(target=self.loss.select_target(self.target, index, self.seen.own))
        if self.seen.own and targets.labels is not None:
            targets = targets._replace(labels=targets.labels[index : index + 1])
        smoothing = self.label_smoothing[index] if isinstance(self.label_smoothing, tuple) else self.label_smoothing
        return replace(self, labelled=labelled, seen=seen, targets=targets, label_smoothing=smoothing)
