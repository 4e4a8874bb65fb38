"""Distillation losses: what a student learns from the teachers' logits.

A loss is a frozen dataclass with two functions: `target`, which turns the teachers' logits into what is learned about
each example, and `loss`, which compares students with it. Everything else is optional: methods that need another form
of the student, another model selection or a check of their own override the hooks below.

    L = w_labels · CE(y, p_s) + w_teacher · loss(z_s, target(z_t)),   (1 - α, α) by default            (1)
"""
# Not `from __future__ import annotations`: types of inherited fields are then values and need no import elsewhere.

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Optional

from pydantic import Field
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.errors import EnfoldError
from enfold.tasks import Task
from enfold.train import TrainConfig
from enfold.train.objective import batch_outputs

if TYPE_CHECKING:
    from enfold.distill.cached import CachedTeacher
    from enfold.distill.objective import BatchLoss
    from enfold.distill.teacher import Teacher

Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class DistillationLoss(ABC):
    """Base of all distillation losses.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
    """

    alpha: Fraction = 1.0

    default_init: ClassVar[Optional[Literal["random"]]] = None  # noqa: UP045 - evaluated at run time
    """The value of `init` if the caller gives none and the student has the members' architecture."""
    ignored_warnings: ClassVar[tuple[type[Warning], ...]] = ()
    """Warnings of the training loop that do not apply to the method."""

    @abstractmethod
    def target(self, logits: Tensor) -> Tensor:
        """Return what is learned from the teachers' logits, example by example: (T, N, C) -> (..., N, K)."""

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return the teachers' term for each student, (S,).

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """

    def task_target(self, values: Tensor, task: Task) -> Tensor:
        """Return what is learned from the rows of the teachers: (T, N, K) -> (..., N, K').

        Losses that are defined for other tasks than classes override this function and `task_loss`.
        """
        if not task.is_categorical:
            raise EnfoldError(
                f"loss={type(self).__name__}() is defined for classes, got task='{task.name}': use KD(), OneToOne(), "
                "Hydra() or LatentBE()"
            )
        return self.target(values)

    def weighted_target(self, values: Tensor, task: Task, weights: tuple[float, ...]) -> Tensor:
        """Return `task_target` for teachers with weights; losses that use their mean override this function.

        Args:
            values: Rows of the teachers, (T, N, K).
            task: The task of the teachers.
            weights: Normalized weights of the teachers.

        Raises:
            EnfoldError: If the loss compares students with each teacher, so that weights have no place in it.
        """
        raise EnfoldError(
            f"loss must be KD() for a teacher with weights of its members, got {type(self).__name__}(), in which all "
            "teachers are equal: pass loss=KD(), or call teacher.set_weights(None)"
        )

    def task_loss(self, values: Tensor, target: Tensor, progress: float, task: Task) -> Tensor:
        """Return the teachers' term for each student, (S,), from rows of the students, (S, N, K).

        Args:
            values: Rows of the students, (S, N, K).
            target: What `task_target` returned for these rows.
            progress: The completed fraction of the training.
            task: The task of the students.
        """
        return self.loss(values, target, progress)

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of the labels' and of the teachers' term in equation (1)."""
        return 1 - self.alpha, self.alpha

    @property
    def is_separable(self) -> bool:
        """Return whether the loss of a student depends on that student only, so that students may run one by one."""
        return True

    def select_target(self, target: Tensor, index: int, own: bool) -> Tensor:
        """Return the target of one student; `own` says whether each student has its own batch.

        Args:
            target: The target of all students.
            index: Index of the student.
            own: Whether each student has its own batch.
        """
        return target[..., index : index + 1, :, :] if own else target

    def extra_target(self, teacher: "Teacher", batch: Batch) -> Tensor | None:
        """Return what a batch needs from the teachers beside their logits; None if nothing."""
        return None

    def student_terms(self, model: nn.Module, step: "BatchLoss") -> tuple[Tensor, Tensor]:
        """Return the students' outputs, (S, B, ...), and the weighted teachers' term of equation (1), (S,)."""
        outputs, weight = batch_outputs(model, step.seen), self.weights[1]
        loss = self.task_loss(step.rows(outputs), step.target, step.progress, step.student_task(outputs))
        return outputs, loss if weight == 1 else weight * loss

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Return the training settings that the method needs."""
        return config

    def pretrain(self, config: TrainConfig) -> "tuple[DistillationLoss, TrainConfig] | None":
        """Return loss and settings of a distillation of the network before `build_student`; None if there is none."""
        return None

    def build_student(self, network: nn.Module, num_teachers: int, config: TrainConfig) -> nn.Module:
        """Return the student that starts from this network, or from the ensemble that the caller passed.

        Args:
            network: The network from which the student starts, or the ensemble passed as `student`.
            num_teachers: Number of teachers, T.
            config: The training settings.
        """
        return network

    def check(self, teacher: "Teacher", student: nn.Module, config: TrainConfig) -> None:  # noqa: B027 - optional
        """Raise an error if teachers, student and settings do not fit each other; called before training.

        Args:
            teacher: The teachers.
            student: The student, as it is before the training.
            config: The training settings.
        """

    def evaluated_model(self, student: nn.Module) -> nn.Module:
        """Return the model that is evaluated on validation data after each epoch."""
        return self.as_predictor(student)

    def check_result(  # noqa: B027 - optional
        self, student: nn.Module, models: "nn.Module | CachedTeacher", data: Data
    ) -> None:
        """Warn about a trained student that does not represent its teachers.

        Args:
            student: The trained student.
            models: The teachers, or their stored logits.
            data: The training data.
        """

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """Return the result of the distillation from the trained student."""
        return student

    def as_predictor(self, network: nn.Module) -> nn.Module:
        """Return the model whose outputs are logits of class probabilities, given the result of a distillation."""
        return network
