"""Tasks: what the outputs of a network mean, and how they are trained, averaged and scored."""

from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.classification import Classification
from enfold.tasks.infer import Inferred, TaskLike, TaskName, as_task, current_task, known_task

__all__ = [
    "Classification",
    "Inferred",
    "Prediction",
    "Rows",
    "Task",
    "TaskLike",
    "TaskName",
    "as_task",
    "current_task",
    "known_task",
]
