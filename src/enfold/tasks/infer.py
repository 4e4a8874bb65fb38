"""The task that a user named, or the one that follows from outputs and targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.binary import Binary
from enfold.tasks.classification import Classification
from enfold.tasks.multilabel import Multilabel
from enfold.tasks.regression import Regression

TaskName = Literal["classification", "binary", "multilabel", "regression"]
TaskLike = TaskName | Task | None
"""The name of a task, a task with its options, or None to infer it from outputs and targets."""

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, Binary, Multilabel, Regression)}
CHOICES = ", ".join(f'task="{name}"' for name in TASKS)


def as_task(task: TaskLike) -> Task:
    """Return a task by its name, a task unchanged, or, for None, one that is inferred from the first batch.

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
    is_float = targets.is_floating_point()
    is_flat = wanted in (out, out[:-1] if out[-1:] == (1,) else out)  # one output per target
    if not is_float and len(out) >= 2 and not is_flat and (out[:1] + out[2:] == wanted or out[:-1] == wanted):
        return Classification().resolve(outputs, targets, own=own)
    if is_flat and not _is_zero_or_one(targets):
        if is_float:
            return Regression().resolve(outputs, targets, own=own)
        raise _open(out, wanted, targets, "numbers or classes")
    if is_flat and not is_float and len(wanted) == 2 and wanted[1] > 1 and bool((targets.sum(-1) == 1).all()):
        raise EnfoldError(
            f"targets of shape {wanted} with one 1 in every row may be one-hot labels of a class or several labels: "
            'pass targets.argmax(1) as targets, or task="multilabel"'
        )
    if is_flat and not is_float:
        return Binary() if len(wanted) == 1 or wanted[1:] == (1,) else Multilabel()
    raise _open(out, wanted, targets, "labels of classes or numbers" if is_flat else "")


def _is_zero_or_one(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _open(out: tuple[int, ...], wanted: tuple[int, ...], targets: Tensor, reading: str) -> EnfoldError:
    """Return the error for a task that does not follow from the shapes."""
    what = f", which may be {reading}" if reading else ""
    return UnsupportedOutput(
        f"the task must be named for outputs of shape {out} and targets of shape {wanted} and type "
        f"{str(targets.dtype).removeprefix('torch.')}{what}: pass {CHOICES}, or a task with its options"
    )


def current_task(task: Task) -> Task:
    """Return a task that was named, or the one that was inferred; `task` itself if there was no batch yet."""
    return task.found[0] if isinstance(task, Inferred) and task.found else task


def known_task(task: Task) -> Task | None:
    """Return a task that was named, or inferred from a batch; None if it is unknown or logits of classes."""
    found = current_task(task)
    return None if isinstance(found, Inferred) or found == Classification() else found


@dataclass(frozen=True, repr=False)
class Inferred(Task):
    """The task that follows from the first batch for which it is resolved.

    Args:
        found: The task, after the first batch.
    """

    found: list[Task] = field(default_factory=list, repr=False)

    name: ClassVar[str] = "inferred"

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the inferred task."""
        if not self.found:
            self.found.append(infer_task(outputs, targets, own=own))
        return self.found[0].resolve(outputs, targets, own=own)

    def __repr__(self) -> str:
        """The same as of the argument from which it was made, because checkpoints store the settings of a loss."""
        return "None"

    def rows(self, outputs: Tensor) -> Tensor:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")

    def row_losses(self, rows: Rows, smoothing: Any = 0.0) -> Tensor:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")

    def predict(self, outputs: Tensor) -> Prediction:
        """Predict classes, the only task that follows from outputs of shape (M, B, C) without targets."""
        return Classification().predict(outputs)

    def predictions(self, rows: Rows) -> Any:
        """Raise an error: `resolve` returns the task to use."""
        raise TypeError("resolve() returns the task to use")
