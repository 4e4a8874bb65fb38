"""Local processes: started with `spawn`, each with its own threads and devices, and reused for many tasks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from enfold.errors import EnfoldError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICES = "CUDA_VISIBLE_DEVICES"
_environment = threading.Lock()


class LocalExecutor(Executor):
    """Worker processes on this machine.

    The environment of a worker is set before it starts, so that threads and devices hold when torch is imported. A
    worker that ends abruptly is replaced; only its own task fails, with `BrokenProcessPool`. Workers end with this
    process, even if it is killed.

    Args:
        workers: The number of processes.
        threads: Threads of each.
        devices: Ids of CUDA devices, which are given to the workers in turn; empty to leave all visible.
    """

    def __init__(self, workers: int, threads: int = 1, devices: Sequence[str] = ()) -> None:
        self.workers, self.threads = workers, threads
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._all = []
        for index in range(workers):
            environment = dict.fromkeys(THREADS, str(threads))
            if devices:
                environment[DEVICES] = devices[index % len(devices)]
            self._all.append(_Worker(environment))
            self._free.put(self._all[-1])
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="enfold worker")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function of a module in a worker."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        worker = self._free.get()
        try:
            return worker.call(fn, *args, **kwargs)
        finally:
            self._free.put(worker)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; with `wait=False`, also those that are still working."""
        if not wait:
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=cancel_futures)
        for worker in self._all:
            worker.close()


class _Worker:
    """One process, which is started with its first task."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.pool: ProcessPoolExecutor | None = None
        self.pid: int | None = None

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.pool is None:
            self._start()
        assert self.pool is not None  # noqa: S101 - it was started
        try:
            return self.pool.submit(fn, *args, **kwargs).result()
        except BrokenProcessPool:
            self.close()
            raise

    def _start(self) -> None:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare)
        with _environment:
            before = {name: os.environ.get(name) for name in self.environment}
            os.environ.update(self.environment)
            try:
                started = pool.submit(os.getpid)  # the process inherits the environment of this moment
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})
        try:
            self.pid = started.result()
        except BrokenProcessPool as error:
            pool.shutdown()
            raise EnfoldError(
                "worker processes must be able to start, but the first one ended: in a script, call it below "
                "if __name__ == '__main__':"
            ) from error
        self.pool = pool

    def kill(self) -> None:
        if self.pid is not None and self.pool is not None:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.pool = self.pid = None


def _prepare() -> None:
    """Prepare a worker: an interrupt is for the parent, whose end also ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
