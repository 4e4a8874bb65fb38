"""The task that a user named, or the one that follows from outputs and targets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from enfold.arguments import check_arguments
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.weights import Weights
from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.binary import Binary, is_same
from enfold.tasks.classification import IGNORED, Classification
from enfold.tasks.multilabel import Multilabel
from enfold.tasks.regression import Regression

TaskName = Literal["classification", "binary", "multilabel", "regression"]
"""The names that `task=` accepts."""
TaskLike = TaskName | Task | None
"""The name of a task, a task with its options, or None to infer it from outputs and targets."""

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, Binary, Multilabel, Regression)}
CHOICES = ", ".join(f'task="{name}"' for name in TASKS)
_CLASSES = Classification()  # made here: torch.compile and strict export cannot check options


def as_task(task: TaskLike) -> Task:
    """Return a task by its name, a task unchanged, or, for None, one that is inferred from the first batch.

    Args:
        task: A task, its name, or None.

    Raises:
        EnfoldError: If there is no task of that name.
    """
    if task is None:
        return Inferred()
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise EnfoldError(f"task must be one of {', '.join(TASKS)}, a Task or None, got {task!r}: change task")
    return TASKS[task]()


def first_batch_task(task: TaskLike) -> Task:
    """Return a task that, from the first batch on, has everything that follows from the shapes of that batch.

    Args:
        task: A task, its name, or None.
    """
    found = as_task(task)
    return found if isinstance(found, Inferred) else FirstBatchTask(given=found)


def task_to_dict(task: Task | None) -> dict[str, Any] | None:
    """Return a task as plain values for JSON."""
    if task is None:
        return None
    options = {each.name: getattr(task, each.name) for each in fields(task)}
    return {"name": task.name, "options": options}


def task_from_dict(content: dict[str, Any] | None) -> Task | None:
    """Invert `task_to_dict`.

    Raises:
        EnfoldError: If there is no task of that name, or an option is invalid.
    """
    if content is None:
        return None
    stored = content if isinstance(content, dict) else {}
    name, options = str(stored.get("name")), stored.get("options")
    kind = TASKS.get(name) or _imported_tasks().get(name)
    if kind is None or not isinstance(options, dict):
        raise EnfoldError(
            f"task must be one of {', '.join(TASKS)} with its options, or a task whose class is imported, got "
            f"{repr(content)[:100]}: import the class first"
        )
    return kind(**check_arguments(kind, options))


def _imported_tasks() -> dict[str, type[Task]]:
    """Return the tasks that are defined outside of this package, by name."""
    classes, found = list(Task.__subclasses__()), {}
    while classes:
        kind = classes.pop()
        if hasattr(kind, "name") and not issubclass(kind, Inferred):
            found[kind.name] = kind
        classes += kind.__subclasses__()
    return found


def infer_task(outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
    """Return the task that follows from the shapes and types of a batch.

    Args:
        outputs: Outputs of all members, (M, B, ...).
        targets: Targets (B, ...), or (M, B, ...) if `own`.
        own: Whether members have batches of their own.

    Raises:
        EnfoldError: If several tasks or none fit; the message names shapes and the tasks to choose from.
    """
    if not isinstance(targets, Tensor):
        raise EnfoldError(
            f"targets must be a tensor, got {type(targets).__name__}: return a tensor from the loader, or select it "
            "with unpack="
        )
    out, wanted = tuple(outputs.shape[1:]), tuple(targets.shape[1:] if own else targets.shape)
    task: Task | None = None
    if targets.is_floating_point():
        is_number = is_same(out, wanted) and not _is_zero_or_one(targets) and not _is_distribution(targets)
        task = Regression() if is_number else None
    elif is_same(out, wanted):  # one output per target
        is_single = _is_zero_or_one(targets) and (len(wanted) == 1 or out != wanted or 1 in wanted[1:])
        task = Binary() if is_single else Multilabel() if _is_zero_or_one(targets) and len(out) == 2 else None
    elif len(out) >= 2 and (out[:1] + out[2:] == wanted or out[:-1] == wanted):
        task = Classification()
    if isinstance(task, Multilabel) and out[1] > 1 and bool((targets.sum(-1) == 1).all()):
        raise EnfoldError(
            f"targets of shape {wanted} with a single 1 in every row may be one-hot labels of a class or several "
            'labels: pass targets.argmax(1) as targets, or task="multilabel"'
        )
    if task is None:
        raise _open(out, wanted, targets, _READINGS[targets.is_floating_point()] if is_same(out, wanted) else "")
    return task.resolve(outputs, targets, own=own)


_READINGS = ("classes or numbers", "labels or probabilities of classes, or numbers")  # of integers, of floats
_OF_ONE = 1e-3  # rounding errors of a sum of probabilities


def _is_zero_or_one(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1) | (values == IGNORED)).all())


def _is_distribution(values: Tensor) -> bool:
    """Return whether these may be probabilities of several classes."""
    if values.ndim < 2 or values.shape[-1] < 2 or bool((values < 0).any()):
        return False
    return bool(((values.sum(-1) - 1).abs() < _OF_ONE).all())


def _open(out: tuple[int, ...], wanted: tuple[int, ...], targets: Tensor, reading: str) -> EnfoldError:
    """Return the error for a task that does not follow from the shapes."""
    what = f", which may be {reading}" if reading else ""
    without = wanted[:1] + tuple(size for size in wanted[1:] if size != 1)
    fits = without != wanted and without in (out[:1] + out[2:], out[:-1]) and not targets.is_floating_point()
    hint = "remove the axis of size 1 with targets.squeeze(1) if they are class indices, or " if fits else ""
    return UnsupportedOutput(
        f"the task must be named for outputs of shape {out} and targets of shape {wanted} and type "
        f"{str(targets.dtype).removeprefix('torch.')}{what}: {hint}pass {CHOICES}, or a task with its options such as "
        'task=Regression(head="gaussian")'
    )


def current_task(task: Task) -> Task:
    """Return a task that was named, or the one that was inferred; `task` itself if there was no batch yet.

    Args:
        task: A task, also one that is inferred.
    """
    return task.found[0] if isinstance(task, Inferred) and task.found else task


def may_have_classes(task: TaskLike) -> bool:
    """Return whether a task has classes, or may have, as far as is known before the first batch.

    Args:
        task: A task, its name, or None.
    """
    found = current_task(as_task(task))
    named = getattr(found, "given", found.argument) if isinstance(found, Inferred) else found
    return named is None or named.is_categorical


def known_task(task: Task) -> Task | None:
    """Return a task that was named, or inferred from a batch; None if there was no batch yet.

    Args:
        task: A task, also one that is inferred.
    """
    found = current_task(task)
    return None if isinstance(found, Inferred) else found


@dataclass(frozen=True, repr=False)
class Inferred(Task):
    """The task that follows from the first batch for which it is resolved.

    Args:
        found: The task, after the first batch.
    """

    found: list[Task] = field(default_factory=list, repr=False)

    name: ClassVar[str] = "inferred"

    @property
    def argument(self) -> Task | None:
        """The argument from which it was made."""
        return None

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the inferred task.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if not self.found:
            if targets is None:
                raise EnfoldError(
                    f"task must be given where it follows neither from the training of the teacher nor from targets, "
                    f"got task=None: pass {CHOICES}, or a task with its options"
                )
            self.found.append(infer_task(outputs, targets, own=own))
        return self.found[0].resolve(outputs, targets, own=own)

    def __repr__(self) -> str:
        """The same as of the argument from which it was made, because checkpoints store the settings of a loss."""
        return repr(self.argument)

    def rows(self, outputs: Tensor) -> Tensor:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Raise an error: `resolve` returns the task to use.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too.
        """
        raise TypeError("resolve() returns the task to use")

    def row_losses(self, rows: Rows, smoothing: Any = 0.0) -> Tensor:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")

    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Predict classes, the only task that follows from outputs of shape (M, B, C) without targets."""
        return _CLASSES.predict(outputs, weights)

    def predictions(self, rows: Rows) -> Any:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")


@dataclass(frozen=True, repr=False)
class FirstBatchTask(Inferred):
    """A task with everything that follows from the shapes of the first batch, such as the axis of the classes.

    Args:
        found: The task, after the first batch.
        given: The task before it.
    """

    given: Task = field(default_factory=Classification)

    @property
    def argument(self) -> Task:
        """The task before the first batch."""
        return self.given

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if not self.found:
            self.found.append(self.given.resolve(outputs, targets, own=own))
        return self.found[0].resolve(outputs, targets, own=own)


@dataclass(frozen=True, repr=False)
class StudentTask(Inferred):
    """The task of a student of a teacher, which follows from the student's outputs for the first batch.

    Args:
        found: The task, after the first batch.
        teacher: The task of the teacher.
    """

    teacher: Task = field(default_factory=Classification)

    @property
    def argument(self) -> Task | None:
        """The argument from which the task of the teacher was made."""
        return self.teacher.argument if isinstance(self.teacher, Inferred) else self.teacher

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task of the student.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        return self.resolve_for(current_task(self.teacher), outputs, targets, own=own)

    def resolve_for(self, teacher: Task, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task of the student of a teacher with this task, which may be known after its first batch.

        Args:
            teacher: The task of the teacher.
            outputs: Outputs of the student, (S, B, ...).
            targets: Targets (B, ...), or (S, B, ...) if `own`.
            own: Whether students have batches of their own.
        """
        if not self.found:
            self.found.append(teacher.for_outputs(outputs, targets, own=own))
        return self.found[0].resolve(outputs, targets, own=own)
