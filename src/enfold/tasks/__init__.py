"""Tasks: what the outputs of a network mean, and how they are trained, averaged and scored."""

from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.classification import Classification
from enfold.tasks.infer import TaskLike, as_task

__all__ = ["Classification", "Prediction", "Rows", "Task", "TaskLike", "as_task"]
