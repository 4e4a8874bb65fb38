"""Parallel: on how many workers, of which kind, tasks run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt

from enfold.arguments import checked
from enfold.errors import EnfoldError, closest
from enfold.executors.local import LocalExecutor
from enfold.executors.ray import RayExecutor

KINDS = ("serial", "local", "ray", "auto")


@checked
@dataclass(frozen=True)
class Parallel:
    """Where the tasks of a call run. ``executor="local"`` is short for ``executor=Parallel("local")``.

    Args:
        executor: "serial" (one task after the other in this process), "local" (processes on this machine), "ray" (a Ray
            cluster), "auto" ("serial" or "local", whichever is faster in a short measurement), or an object of
            `concurrent.futures.Executor`, which is not shut down.
        workers: Number of tasks at a time; by default as many as there are CPUs, or what the cluster has.
        threads: Threads of each worker; by default the CPUs divided by the workers.
        block_size: Members that one task trains together. Results depend on it: to rounding, as batched products do,
            and with dropout, whose masks are drawn for a block.
        store: Folder, or address of fsspec such as "s3://bucket/folder", in which results of tasks are kept, so that a
            repeated task costs nothing. None for a folder beside `checkpoint`, or a temporary one.
        address: Address of the Ray cluster; None starts one on this machine.
    """

    executor: str | Executor = "local"
    workers: PositiveInt | None = None
    threads: PositiveInt | None = None
    block_size: PositiveInt = 1
    store: str | Path | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.executor not in KINDS and not isinstance(self.executor, Executor):
            near = closest(str(self.executor), KINDS)
            suggestion = f", did you mean '{near}'?" if near else ""
            raise EnfoldError(
                f"executor must be one of {', '.join(KINDS)} or a concurrent.futures.Executor, got "
                f"{self.executor!r}{suggestion}: change executor"
            )
        if self.address is not None and self.executor != "ray":
            raise EnfoldError(f"address is that of a Ray cluster, got executor={self.executor!r}: set executor='ray'")

    @property
    def kind(self) -> str:
        """The name of the executor."""
        return self.executor if isinstance(self.executor, str) else type(self.executor).__name__

    def sizes(self, tasks: int) -> tuple[int, int]:
        """Return the number of workers for a number of tasks, and the threads of each."""
        cpus = count_cpus()
        workers = self.workers or max(1, min(tasks, cpus // (self.threads or 1)))
        return workers, self.threads or max(1, cpus // workers)

    @contextmanager
    def open(self, tasks: int, device: str = "cpu") -> Iterator[tuple[Executor, int]]:
        """Yield an executor and the number of tasks to submit at a time.

        It is shut down after the block. If the block fails, workers are ended.

        Args:
            tasks: The number of tasks.
            device: The device of the tasks.
        """
        workers, threads = self.sizes(tasks)
        if self.executor == "auto":
            raise EnfoldError(
                "executor='auto' is a choice by measured training steps, which there are none of here: name serial, "
                "local or ray"
            )
        if isinstance(self.executor, Executor):
            yield self.executor, self.workers or getattr(self.executor, "_max_workers", None) or workers
            return
        executor: Executor
        if self.executor == "ray":
            executor = RayExecutor(self.address, self.threads or 1, float(device.startswith("cuda")), self.workers)
            slots = self.workers or executor.slots
        elif self.executor == "local":
            executor, slots = LocalExecutor(workers, threads, _devices(device)), workers
        else:
            executor, slots = SerialExecutor(), 1
        try:
            yield executor, slots
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        executor.shutdown()


ExecutorLike = Parallel | Executor | str | None
"""What `executor=` accepts: "serial", "local", "ray", "auto", an `Executor`, `Parallel` with its options, or None."""


def as_parallel(executor: ExecutorLike) -> Parallel | None:
    """Return the options of a name or an executor; None for None."""
    return executor if executor is None or isinstance(executor, Parallel) else Parallel(executor)


class SerialExecutor(Executor):
    """Call functions in this process, when they are submitted."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function."""
        found: Future[Any] = Future()
        try:
            found.set_result(fn(*args, **kwargs))
        except Exception as error:
            found.set_exception(error)
        return found


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _devices(device: str) -> tuple[str, ...]:
    """Return the ids of the devices that workers share out; empty to leave all visible."""
    return tuple(map(str, range(torch.cuda.device_count()))) if device == "cuda" else ()
