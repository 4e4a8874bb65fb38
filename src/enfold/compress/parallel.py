"""Trials on an executor: those of a round are trained side by side, and the search then takes them from the folder.

A trial is identified by the name of its file, a digest of members, data, settings, route and epochs, so that it is the
same whether a worker or the search itself trains it.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from enfold.compress.routes import Route, Setting
from enfold.compress.runner import Limit, Runner
from enfold.compress.trainings import find_routes, make_controls
from enfold.executors import Parallel, Store, Task, run_tasks
from enfold.metrics.predictions import RowPredictions
from enfold.train.shared_data import SharedData


@dataclass(frozen=True)
class TrialJob:
    """What a worker needs to train one trial.

    Args:
        setting: What routes start from, without the data.
        data: The data.
        found: Predictions of the members on validation examples.
        merged: The merge that distillations may start from.
        expensive: Whether there are expensive routes.
        identity: Digest of what all trials depend on.
        name: The route or the control.
        epochs: Epochs of training.
    """

    setting: Setting
    data: SharedData
    found: RowPredictions
    merged: nn.Module | None
    expensive: bool
    identity: str
    name: str
    epochs: int


@dataclass
class Trials:
    """The trials of a search on an executor.

    Args:
        runner: What runs the trials of the search.
        setting: What routes start from.
        found: Predictions of the members on validation examples.
        merged: The merge that distillations may start from.
        expensive: Whether there are expensive routes.
        parallel: Where trials run.
    """

    runner: Runner
    setting: Setting
    found: RowPredictions
    merged: nn.Module | None
    expensive: bool
    parallel: Parallel

    def train(self, names: Sequence[str], epochs: int) -> None:
        """Train trials that are not in the folder; those that fail are known to the runner afterwards.

        Args:
            names: The names of routes and controls.
            epochs: Epochs of training.
        """
        runner = self.runner
        assert runner.folder is not None  # noqa: S101 - an executor has one
        store = Store(runner.folder)
        data = SharedData.write(self.setting.data, store)
        setting = replace(self.setting, data=data.data)
        tasks = []
        for name in names:
            path = runner.store.path(name, f"{epochs} {self.setting.config.changes()}")
            assert path is not None  # noqa: S101 - there is a folder
            job = TrialJob(setting, data, self.found, self.merged, self.expensive, runner.store.identity, name, epochs)
            tasks.append(Task(name, path.name, train_trial, (job,)))
        failures = run_tasks(
            tasks, store, self.parallel, device=self.setting.config.device, title="compress", quiet=runner.quiet
        )
        files = {task.name: task.output for task in tasks}
        runner.failed |= {files[failure.task]: failure.message for failure in failures}


def train_trial(store: Store, job: TrialJob) -> None:
    """Train a trial and write it to the folder of the search."""
    setting = replace(job.setting, data=job.data.read(store))
    assert store.folder is not None  # noqa: S101 - the folder of a search is local
    runner = Runner(Limit(clock.monotonic()), setting.budget, setting.memory, Path(store.folder), quiet=True)
    runner.store.identity = job.identity
    controls = make_controls(setting, runner)
    if job.name in controls:
        idea, make = controls[job.name]
        runner.result(Route(job.name, idea), setting, job.epochs, partial(make, job.epochs))
        return
    (route,) = [
        each for each in find_routes(setting, job.found, job.merged, expensive=job.expensive) if each.name == job.name
    ]
    runner.result(route, setting, job.epochs, runner.making(route, setting, job.epochs))
