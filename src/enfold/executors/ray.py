"""Ray: tasks on a cluster of machines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from enfold.errors import EnfoldError, MissingExtra


class RayExecutor(Executor):
    """Tasks on a Ray cluster, as a `concurrent.futures.Executor`.

    Ray repeats nothing by itself: `run_tasks` decides what is repeated.

    Args:
        address: Address of the cluster, such as "auto" or "ray://head:10001"; None starts one on this machine, which
            ends with the executor. A cluster that this process is connected to already is used as it is.
        threads: CPUs that a task takes, and its threads.
        gpus: GPUs that a task takes.
        workers: Number of tasks at a time on a cluster that is started here.
    """

    def __init__(
        self, address: str | None = None, threads: int = 1, gpus: float = 0, workers: int | None = None
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray", "executor='ray'") from error
        self._ray, self.threads, self._owned = ray, threads, not ray.is_initialized()
        if self._owned:
            options: dict[str, Any] = {
                "address": address or "local",
                "log_to_driver": False,
                "configure_logging": False,
            }
            if address is None:
                cpus = None if workers is None else workers * threads
                options |= {"num_cpus": cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise EnfoldError(
                    f"address must be that of a Ray cluster, got {address!r} ({str(error).splitlines()[0]}): start one "
                    "with  ray start --head"
                ) from error
        environment = {"env_vars": {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}}
        self._remote = ray.remote(_call).options(
            num_cpus=threads, num_gpus=gpus, max_retries=0, runtime_env=environment
        )

    @property
    def slots(self) -> int:
        """The number of tasks that the cluster runs at a time."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1) // self.threads))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function on the cluster."""
        found: Future[Any] = Future()
        found.set_running_or_notify_cancel()
        self._remote.remote(fn, args, kwargs).future().add_done_callback(lambda done: self._finish(done, found))
        return found

    def _finish(self, done: Future[Any], found: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            found.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.OutOfMemoryError):
            found.set_exception(MemoryError(str(error)))
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            found.set_exception(error.cause if isinstance(error.cause, Exception) else error)
        else:  # the worker or its node ended
            found.set_exception(BrokenProcessPool(f"{type(error).__name__}: {str(error).splitlines()[0]}"))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect, and end the cluster if it was started here."""
        if self._owned and self._ray.is_initialized():
            self._ray.shutdown()


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
