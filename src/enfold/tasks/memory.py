"""The task that a network was trained for, stored with its weights.

It is stored in the network's `__dict__` as text, so that copies of the network have it, its state dict does not, and a
pickled network does not refer to enfold. Tasks that are defined elsewhere are stored as objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.tasks.base import Task
from enfold.tasks.infer import (
    TASKS,
    FirstBatchTask,
    TaskLike,
    first_batch_task,
    infer_task,
    task_from_dict,
    task_to_dict,
)

TASK = "enfold_task"  # the attribute of a network with its task


def remember_task(network: nn.Module, task: Task | None) -> None:
    """Record the task that a network was trained for; None removes it.

    Args:
        network: The network.
        task: The task.
    """
    if task is None:
        vars(network).pop(TASK, None)
        return
    is_own = TASKS.get(task.name) is type(task)
    vars(network)[TASK] = json.dumps(task_to_dict(task)) if is_own else task


def task_of(model: object) -> Task | None:
    """Return the task that a network, an ensemble or a calibrated model was trained for; None if it is unknown.

    Args:
        model: A network, an ensemble or a calibrated model.
    """
    named = getattr(model, "task", None)
    if isinstance(named, Task):
        return named
    stored = getattr(model, "__dict__", {}).get(TASK)
    return task_from_dict(json.loads(stored)) if isinstance(stored, str) else stored


def shared_task(networks: Iterable[nn.Module]) -> Task | None:
    """Return the task that all networks were trained for; None if they differ or it is unknown.

    Args:
        networks: Networks.
    """
    tasks = [task_of(network) for network in networks]
    return tasks[0] if tasks and all(task == tasks[0] for task in tasks) else None


def training_task(model: nn.Module, task: TaskLike) -> Task:
    """Return the task of a training: the named one, else that of an earlier training, else the inferred one.

    Args:
        model: The network or ensemble that is trained.
        task: The `task=` of the training.
    """
    known = task_of(model) if task is None else None
    return first_batch_task(task) if known is None else RememberedTask(given=known)


@dataclass(frozen=True, repr=False)
class RememberedTask(FirstBatchTask):
    """The task of an earlier training of the same network.

    It is not a setting of the later training, so that a checkpoint does not depend on it.
    """

    @property
    def argument(self) -> Any:
        """The argument from which it was made: none."""
        return None

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Task:
        """Return the task.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.

        Raises:
            EnfoldError: If outputs and targets of the first batch are those of a different task.
        """
        if not self.found:
            self._require_same(outputs, targets, own)
        return super().resolve(outputs, targets, own=own)

    def _require_same(self, outputs: Tensor, targets: Any, own: bool) -> None:
        try:
            seen = infer_task(outputs, targets, own=own)
        except EnfoldError:  # the batch leaves it open, or does not fit, which `given` reports
            return
        if seen.name != self.given.name:
            raise EnfoldError(
                f"task must be given for a network that was trained with task='{self.given.name}', got a batch that "
                f"looks like task='{seen.name}': pass task='{self.given.name}' or task='{seen.name}'"
            )
