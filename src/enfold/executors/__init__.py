"""Where work runs: in this process, in local processes, on a Ray cluster, or on any `concurrent.futures.Executor`."""

from enfold.executors.local import LocalExecutor
from enfold.executors.parallel import ExecutorLike, Parallel, as_parallel
from enfold.executors.ray import RayExecutor
from enfold.executors.store import Store
from enfold.executors.tasks import Failure, Task, run_tasks

__all__ = [
    "ExecutorLike",
    "Failure",
    "LocalExecutor",
    "Parallel",
    "RayExecutor",
    "Store",
    "Task",
    "as_parallel",
    "run_tasks",
]
