"""Tasks: what the outputs of a network mean, and how they are trained, averaged and scored."""

from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.binary import Binary
from enfold.tasks.classification import Classification
from enfold.tasks.infer import (
    FirstBatchTask,
    Inferred,
    StudentTask,
    TaskLike,
    TaskName,
    as_task,
    current_task,
    first_batch_task,
    known_task,
    may_have_classes,
)
from enfold.tasks.memory import remember_task, shared_task, task_of, training_task
from enfold.tasks.multilabel import Multilabel
from enfold.tasks.regression import Regression

__all__ = [
    "Binary",
    "Classification",
    "FirstBatchTask",
    "Inferred",
    "Multilabel",
    "Prediction",
    "Regression",
    "Rows",
    "StudentTask",
    "Task",
    "TaskLike",
    "TaskName",
    "as_task",
    "current_task",
    "first_batch_task",
    "known_task",
    "may_have_classes",
    "remember_task",
    "shared_task",
    "task_of",
    "training_task",
]
