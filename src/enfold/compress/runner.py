"""Trials: each is run or taken from the folder, scored, logged and added to the table."""

from __future__ import annotations

import math
import re
import time as clock
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from enfold.compress.limits import ROUNDING
from enfold.compress.result import Trial
from enfold.compress.routes import Route, Setting
from enfold.compress.scores import Scores
from enfold.compress.store import Store, checkpoint_of
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.loggers import Log
from enfold.merge.soup import SingleModelWarning
from enfold.progress import announce
from enfold.train.history import Epoch

Make = Callable[[Path | None, Log], nn.Module]
"""A training, from the file of its checkpoint and its log."""


class OutOfTime(Exception):
    """The wall-clock limit was reached during a training."""


@dataclass
class Limit:
    """The wall-clock limit of a search.

    Args:
        started: Start of the search, on the clock of `time.monotonic`.
        seconds: Limit of its duration; None for none.
    """

    started: float
    seconds: float | None = None

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.seconds is None else self.seconds - (clock.monotonic() - self.started)


@dataclass
class Work:
    """The trainings of a search in units of an epoch of a plain distillation, from which the time left is estimated.

    Args:
        planned: All of them.
        done: Those that are finished.
        seconds: The duration of those.
    """

    planned: float = 0.0
    done: float = 0.0
    seconds: float = 0.0

    def finish(self, units: float, seconds: float) -> None:
        """Count a training."""
        self.done, self.seconds = self.done + units, self.seconds + seconds

    def skip(self, units: float) -> None:
        """Remove a training that is not needed."""
        self.planned -= units

    def left(self) -> float | None:
        """Return the estimated seconds of the others; None before the first is finished."""
        if not self.done or self.planned <= self.done:
            return None
        return self.seconds / self.done * (self.planned - self.done)


@dataclass
class Runner:
    """Runs the trials of a search.

    Args:
        limit: The wall-clock limit.
        budget: Largest cost relative to one member.
        memory: Largest size relative to one member.
        folder: Folder in which finished trials are stored; None for none.
        on_epoch: Called with the record of every epoch of every trial.
        log: Where trials are logged to.
        quiet: Show no progress.
    """

    limit: Limit
    budget: float = 1.0
    memory: float = float("inf")
    folder: Path | None = None
    on_epoch: Callable[[Epoch], None] | None = None
    log: Log = field(default_factory=Log)
    quiet: bool = False
    trials: list[Trial] = field(default_factory=list)
    resumed: int = 0  # trainings that were taken from the folder
    failed: dict[str, str] = field(default_factory=dict)  # trials that failed on an executor, by their files
    final_epochs: int = 0  # shorter and longer trainings have logs of their own

    def __post_init__(self) -> None:
        self.store, self.work = Store(self.folder), Work()

    def use_folder(self, folder: Path) -> None:
        """Store finished trials in this folder."""
        self.folder, self.store = folder, Store(folder)

    def set_scores(self, scores: Scores, best: dict[str, float]) -> None:
        """Set the references by which trials are scored.

        Args:
            scores: The references.
            best: Scores of the best member, by which an unchanged network is recognized.
        """
        self.scores, self.best = scores, best

    def allows(self, cost: float, size: float) -> bool:
        """Return whether something meets the budget."""
        return cost <= ROUNDING * self.budget and size <= ROUNDING * self.memory

    @property
    def limits(self) -> str:
        """The budget in words."""
        return f"{self.budget:g}x" + (f" and {self.memory:g}x memory" if self.memory < float("inf") else "")

    def guard(self, record: Epoch) -> None:
        """Stop a training whose next epoch would exceed the limit by more than half of its duration."""
        if self.on_epoch is not None:
            self.on_epoch(record)
        if self.limit.left() < record.seconds / 2:
            raise OutOfTime

    def run_route(self, route: Route, setting: Setting, epochs: int) -> Trial:
        """Try one route.

        Args:
            route: The route.
            setting: Members, data and diagnosis.
            epochs: Epochs of its training.
        """
        return self.run(route, setting, epochs, self.making(route, setting, epochs), route.kind)

    def making(self, route: Route, setting: Setting, epochs: int) -> Make:
        """Return the training of a route.

        Args:
            route: The route.
            setting: Members, data and diagnosis.
            epochs: Epochs of its training.
        """

        def make(checkpoint: Path | None, log: Log) -> nn.Module:
            return route.run(setting, epochs, on_epoch=self.guard, logger=log, checkpoint=checkpoint, quiet=self.quiet)

        return make

    def run(self, route: Route, setting: Setting, epochs: int, make: Make, kind: str) -> Trial:
        """Run one trial, or take it from the folder, and add it to the table; a failure is a row with its reason.

        Args:
            route: The route.
            setting: Members, data and diagnosis.
            epochs: Epochs of its training.
            make: A function of a checkpoint file and a logger that returns the network.
            kind: What the route is: a merge, a distillation, ....
        """
        before, note, network, resumed = clock.monotonic(), "", None, self.resumed
        try:
            network = self.result(route, setting, epochs, make)
        except OutOfTime:
            note = "stopped: out of time"
        except (EnfoldError, NotImplementedError, RuntimeError) as error:
            note = f"failed: {str(error).split(': ')[0]}"
        seconds = clock.monotonic() - before
        if self.resumed > resumed:
            self.work.skip(epochs * route.effort)
        elif epochs:
            self.work.finish(epochs * route.effort, seconds)
        trial = Trial(route.name, route.idea, {}, float("nan"), 1.0, epochs, seconds, note, kind)
        if network is not None:
            trial = self._add_scores(trial, network)
        self.add(trial)
        criterion = setting.diagnosis.criterion
        shown = trial.scores.get(criterion, math.nan)
        self.say(f"{trial.name}: {note or f'{criterion.upper()} {shown:.4f}, {seconds:.0f} s'}")
        return trial

    def result(self, route: Route, setting: Setting, epochs: int, make: Make) -> nn.Module:
        """Return the model of a trial, from the folder if it is there.

        Args:
            route: The route.
            setting: Members, data and diagnosis.
            epochs: Epochs of its training.
            make: A function of a checkpoint file and a logger that returns the network.

        Raises:
            EnfoldError: If it failed on an executor, where it is not repeated.
        """
        if self.limit.left() <= 0:
            raise OutOfTime
        path = self.store.path(route.name, f"{epochs} {setting.config.changes()}")
        if path is not None and path.exists():
            self.resumed += 1
            return self.store.load(path, route.blank_model(setting))
        if path is not None and path.name in self.failed:
            raise EnfoldError(self.failed[path.name])
        with warnings.catch_warnings():
            for kind in (UnchangedWarning, SingleModelWarning):  # the table says so
                warnings.simplefilter("ignore", kind)
            network = make(checkpoint_of(path), self.part(route.name, epochs))
        self.store.save(network, path)
        return network

    def _add_scores(self, trial: Trial, network: nn.Module) -> Trial:
        scores = self.scores.of(network)
        cost, size = self.scores.cost(network), self.scores.size(network)
        fits = self.allows(cost, size)
        note = "" if fits else f"above the budget of {self.limits}"
        criterion = self.scores.criterion
        own, best = scores.get(criterion, math.nan), self.best.get(criterion, 0.0)
        if fits and trial.epochs and math.isclose(own, best, rel_tol=1e-5):
            note = "unchanged, no epoch was better than the start"
        shipped = network if fits else None
        gain, calibrated = self.scores.gain(scores), self.scores.calibrated_gain(scores)
        measured = replace(trial, scores=scores, gain=gain, calibrated_gain=calibrated, cost=cost, size=size)
        return replace(measured, network=shipped, note=note)

    def add(self, trial: Trial) -> None:
        """Add a row to the table and to the log."""
        self.trials.append(trial)
        if self.log and trial.scores:
            values = {**trial.scores, "gain": trial.gain, "cost": trial.cost, "seconds": trial.seconds}
            results = {f"result/{name}": value for name, value in values.items()}
            self.part(trial.name, trial.epochs).log_metrics(results, trial.epochs)

    def part(self, name: str, epochs: int) -> Log:
        """Return the log of a trial."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        if epochs and epochs != self.final_epochs:
            slug = f"short-{slug}" if epochs < self.final_epochs else f"long-{slug}"
        return self.log.part(slug)

    def say(self, text: str) -> None:
        """Show progress and the time that is left."""
        if not self.quiet:
            seconds = self.work.left() if self.limit.seconds is None else max(0, self.limit.left())
            left = "" if seconds is None else f"  {seconds:.0f} s left"
            announce(f"compress: {text}{left}")
