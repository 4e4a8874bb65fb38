"""Tasks: idempotent pieces of work with one output each, and the rules by which they are repeated.

A task whose output exists is done. A worker that ends abruptly is replaced and its task repeated once, from its
checkpoint; an error is deterministic and never repeated; if memory is exhausted, fewer tasks run at a time.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from enfold.errors import EnfoldError, level_outside
from enfold.executors.parallel import Parallel
from enfold.executors.store import Store
from enfold.io.usercode import LoadedCode
from enfold.progress import announce, progress

EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


@dataclass(frozen=True)
class Task:
    """A piece of work.

    Args:
        name: Its name in messages.
        output: The name of the file that it writes to the store, which contains the digest of all inputs.
        function: A function of a module; it is called with the store and the arguments.
        arguments: The other arguments, which must be picklable.
    """

    name: str
    output: str
    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a task has no output.

    Args:
        task: The name of the task.
        kind: "error" (deterministic), "memory" (exhausted with one task at a time), "crash" (its worker ended twice).
        message: The error in one line, with its type.
        details: The traceback in the worker.
    """

    task: str
    kind: Literal["error", "memory", "crash"]
    message: str
    details: str = ""


@dataclass(frozen=True)
class _Outcome:
    """What a worker returns: exceptions are described, as not all can be sent."""

    seconds: float
    kind: Literal["done", "error", "memory"] = "done"
    message: str = ""
    details: str = ""
    warnings: list[tuple[type[Warning], str]] = field(default_factory=list)


def run_tasks(
    tasks: Sequence[Task], store: Store, parallel: Parallel, *, device: str = "cpu", title: str, quiet: bool = False
) -> list[Failure]:
    """Carry out tasks whose output is missing, and return those that failed.

    Args:
        tasks: The tasks.
        store: Where they write.
        parallel: Where they run.
        device: The device of the tasks.
        title: Title of the progress bar.
        quiet: Show no progress bar; what is repeated is shown nevertheless.
    """
    missing = [task for task in tasks if not store.exists(task.output)]
    if not missing:
        return []
    with parallel.open(len(missing), device) as (executor, slots):
        run, code = _Run(store, deque(missing), slots, title), LoadedCode.current()
        with progress(title, len(tasks), done=len(tasks) - len(missing), quiet=quiet) as bar:
            while run.waiting or run.active:
                while run.waiting and len(run.active) < run.slots:
                    task = run.waiting.popleft()
                    run.active[executor.submit(_call, code, task.function, store, *task.arguments)] = task
                for future in wait(run.active, return_when=FIRST_COMPLETED).done:
                    done = run.finish(future)
                    bar.advance(done is not None)
                    bar.say(done or "")
    return run.failures


@dataclass
class _Run:
    """The state of `run_tasks`."""

    store: Store
    waiting: deque[Task]
    slots: int
    title: str
    active: dict[Future[_Outcome], Task] = field(default_factory=dict)
    crashed: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)

    def finish(self, future: Future[_Outcome]) -> str | None:
        """Take the result of a task; return a text if it is finished, or None if it is repeated."""
        task = self.active.pop(future)
        try:
            outcome = future.result()
        except BrokenExecutor as error:
            return self._after_crash(task, error)
        except MemoryError as error:  # reported by the executor
            outcome = _Outcome(0.0, "memory", str(error))
        except EnfoldError:
            raise
        except Exception as error:
            raise EnfoldError(
                f"the arguments of {task.name} must be sent to a worker, but that fails ({type(error).__name__}: "
                f"{error}): define the classes and functions of network, loss and data in a module, or leave out "
                "executor"
            ) from error
        for category, message in outcome.warnings:
            warnings.warn(f"{task.name}: {message}", category, stacklevel=level_outside())
        if outcome.kind == "memory" and self.slots > 1:
            self.slots = max(1, self.slots // 2)
            self.say(f"{task.name} ran out of memory: repeated with {self.slots} at a time")
            self.waiting.appendleft(task)
            return None
        if outcome.kind != "done":
            self.failures.append(Failure(task.name, outcome.kind, outcome.message, outcome.details))
            return f"{task.name} failed"
        if not self.store.exists(task.output):
            raise EnfoldError(
                f"all workers must write to one place, but '{self.store.address}' does not have the result of "
                f"{task.name}: set store to a folder that all machines share, or to an address such as s3://"
            )
        return f"{task.name}: {outcome.seconds:.1f} s"

    def _after_crash(self, task: Task, error: BrokenExecutor) -> str | None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if task.name in self.crashed:
            self.failures.append(Failure(task.name, "crash", f"its worker ended abruptly twice ({reason})"))
            return f"{task.name} failed"
        self.crashed.add(task.name)
        self.say(f"the worker of {task.name} ended abruptly ({reason}): repeated once, from its checkpoint")
        self.waiting.appendleft(task)
        return None

    def say(self, text: str) -> None:
        announce(f"{self.title}: {text}")


def _call(code: LoadedCode, function: Callable[..., None], store: Store, *arguments: Any) -> _Outcome:
    """Carry out a task in a worker, which has imported the code before it unpickled the other arguments."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        try:
            function(store, *arguments)
            kind, message, details = "done", "", ""
        except Exception as error:
            exhausted = isinstance(error, MemoryError) or any(text in str(error).lower() for text in EXHAUSTED)
            kind = "memory" if exhausted else "error"
            message, details = f"{type(error).__name__}: {error}", traceback.format_exc()
    found = {(_sent(each.category), str(each.message)): None for each in caught}
    return _Outcome(time.perf_counter() - started, kind, message, details, list(found))  # type: ignore[arg-type]


def _sent(category: type[Warning]) -> type[Warning]:
    """Return a category that another process has."""
    return category if category.__module__.split(".")[0] in ("builtins", "enfold") else UserWarning
