"""Members per hour and overhead per task: one process, blocks in it, two processes, Ray.

Writes results/bench-scale.json, with the load average. On a busy machine set OMP_NUM_THREADS=1: threads that wait for
each other take many times as long there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import enfold
from enfold.executors import LocalExecutor, Parallel, RayExecutor, Store, Task, run_tasks
from enfold.executors.parallel import SerialExecutor, count_cpus
from enfold.io.files import write_json
from enfold.networks import MLP
from enfold.saving import versions

RESULT = Path(__file__).parent.parent / "results" / "bench-scale.json"
MEMBERS, ROUNDS, EMPTY = 4, 1, 10


@dataclass(frozen=True)
class Work:
    """A training to measure."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    examples: int
    epochs: int


def small() -> nn.Module:
    """Return an MLP 64-128-10."""
    return MLP(64, [128], 10)


def convolutional() -> nn.Module:
    """Return two convolutions for 16 x 16 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


WORKS = (
    Work("MLP 64-128-10, 2,000 examples, 5 epochs", small, (64,), 2000, 5),
    Work("CNN of 2 layers, 1,000 images of 16 x 16, 2 epochs", convolutional, (3, 16, 16), 1000, 2),
)


def nothing(store: Store, name: str) -> None:
    """Write an empty result: what remains is the overhead of a task."""
    with store.write(name) as path:
        path.write_text("")


def task_seconds(executor: Executor) -> float:
    """Return the seconds of a task that does nothing, on workers that have started."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [Task(str(index), str(index), nothing, (str(index),)) for index in range(EMPTY)]
        started = time.perf_counter()
        run_tasks(tasks, Store(folder), Parallel(executor), title="tasks", quiet=True)
        return (time.perf_counter() - started) / EMPTY


def fit_seconds(work: Work, executor: Executor | None, block_size: int) -> float:
    """Return the seconds in which the members of a training are trained."""
    inputs = torch.randn(work.examples, *work.shape, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(work.examples) % 10
    ensemble = enfold.DeepEnsemble(work.make, MEMBERS)
    where = None if executor is None else Parallel(executor, block_size=block_size)
    started = time.perf_counter()
    enfold.fit(ensemble, (inputs, targets), epochs=work.epochs, select="last", executor=where, quiet=True)
    return time.perf_counter() - started


def spread(values: list[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(with_ray: bool) -> dict[str, Any]:
    """Measure all cases in rotated order, after one training that starts the workers."""
    executors: dict[str, tuple[Executor | None, int]] = {
        "one process, all members together": (None, MEMBERS),
        "one process, 2 blocks": (SerialExecutor(), 2),
        "one process, 4 blocks": (SerialExecutor(), 1),
    }
    start: dict[str, float] = {}
    for name, make in (
        ("2 processes", lambda: LocalExecutor(2, max(1, count_cpus() // 2))),
        ("Ray, 2 tasks at a time", lambda: RayExecutor(workers=2)),
    ):
        if name.startswith("Ray") and not with_ray:
            continue
        began = time.perf_counter()
        executor: Executor = make()
        list(executor.map(torch.set_num_threads, [max(1, count_cpus() // 2)] * 2))
        start[name] = time.perf_counter() - began
        executors |= {f"{name}, 4 blocks": (executor, 1), f"{name}, 2 blocks": (executor, 2)}
    overhead = {
        name: 1000 * task_seconds(executor)
        for name, (executor, size) in executors.items()
        if executor is not None and size == 1
    }
    tables: dict[str, Any] = {}
    for work in WORKS:
        taken: dict[str, list[float]] = {name: [] for name in executors}
        for turn in range(-1, ROUNDS):
            for name in [*list(executors)[max(turn, 0) :], *list(executors)[: max(turn, 0)]]:
                seconds = fit_seconds(work, *executors[name])
                if turn >= 0:
                    taken[name].append(3600 * MEMBERS / seconds)
        tables[work.name] = {name: spread(values) for name, values in taken.items()}
    for made, _ in executors.values():
        if made is not None:
            made.shutdown()
    return {"members_per_hour": tables, "start_seconds": start, "task_milliseconds": overhead}


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    os.environ.setdefault("RAY_worker_niceness", "0")  # that of the other processes; 15 by default
    before = os.getloadavg()
    found = measure(with_ray=not parser.parse_args().no_ray)
    about = {
        "command": "python bench/scale.py",
        "date": time.strftime("%Y-%m-%d"),
        "cpus": count_cpus(),
        "members": MEMBERS,
        "rounds": ROUNDS,
        "load_average": {"before": before[0], "after": os.getloadavg()[0]},
        "versions": versions(),
    }
    write_json(RESULT, {**about, **found})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
