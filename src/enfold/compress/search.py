"""compress: try what is promising within a budget, choose on validation examples, and explain the choice."""

from __future__ import annotations

import math
import sys
import time as clock
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.compress.diagnosis import Diagnosis, diagnose
from enfold.compress.distillations import find_distillations
from enfold.compress.efficient import find_ensembles
from enfold.compress.limits import ROUNDING
from enfold.compress.members import Student
from enfold.compress.merges import find_merges
from enfold.compress.result import Compression, Trial
from enfold.compress.routes import Route, Setting
from enfold.compress.schedule import LONG, make_rounds, plan_epochs
from enfold.compress.scores import Scores, all_scores
from enfold.compress.store import Store, checkpoint_of
from enfold.data import Data
from enfold.data.content import content
from enfold.distill.control import train_control
from enfold.engines.copying import copy_network
from enfold.engines.initialization import initialize_member
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import predict
from enfold.io.files import digest
from enfold.metrics import metrics_for
from enfold.metrics.predictions import RowPredictions
from enfold.tasks import Task
from enfold.train import TrainConfig, fit
from enfold.train.history import Epoch

Effort = Literal["default", "all"]
PART = 0.85  # of the time that is left is planned for trainings
LONGER = 0.4  # of it may be spent on training the members longer
CLOSE = 1.5  # a distillation starts from a merge whose loss is at most this multiple of the mean member's


Control = tuple[str, Callable[[int, Path | None], nn.Module]]
"""What a control does, and its training from the number of epochs and the file of the checkpoint."""


class OutOfTime(Exception):
    """The wall-clock limit was reached during a training."""


@dataclass
class Search:
    """The state of one search.

    Args:
        members: The ensemble.
        data: Training and validation examples.
        task: What the outputs mean.
        config: Settings of training; `folds` are used only if the members are trained longer.
        budget: Largest cost relative to one member.
        started: Start of the search, on the clock of `time.monotonic`.
        seconds: Limit of its duration; None for none.
        memory: Largest size relative to one member.
        students: Networks of other architectures to distil into.
        base: The network that the members were fine-tuned from.
        folds: Which member was trained on which example.
        effort: "default", or "all" to include expensive routes.
        folder: Folder in which finished trials are stored.
        quiet: Show no progress.
    """

    members: Ensemble
    data: Data
    task: Task
    config: TrainConfig
    budget: float
    started: float
    seconds: float | None = None
    memory: float = float("inf")
    students: tuple[Student, ...] = ()
    base: nn.Module | None = None
    folds: Tensor | None = None
    effort: Effort = "default"
    folder: Path | None = None
    quiet: bool = False
    trials: list[Trial] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    resumed: int = 0

    def run(self, *, train_longer: bool = False) -> Compression:
        """Diagnose the members, try the routes, and return the result.

        Args:
            train_longer: Whether to train members that are not fully trained longer first.
        """
        self.store = Store(self.folder, self._identity())
        self._say("diagnosing the members")
        diagnosis = diagnose(self.members, self.data, self.task, self.config)
        longer = 0
        if train_longer and diagnosis.needs_training:
            longer = self._train_longer(diagnosis)
            diagnosis = diagnose(self.members, self.data, self.task, self.config) if longer else diagnosis
        self.config = _for_one(self.config, diagnosis.best_member)
        setting = Setting(
            self.members,
            self.data,
            self.task,
            self.config,
            diagnosis,
            self.students,
            self.base,
            self.folds,
            self.budget,
            self.memory,
        )
        found = predict(self.members, self.data.val, task=self.task)
        self._add_references(setting, found)
        self._require_budget(setting, found)
        for route in find_merges(setting, expensive=self.effort == "all"):
            self._try(route, setting, 0)
        self._train(setting, found)
        return self._choose(diagnosis, found, longer)

    # Members

    def _train_longer(self, diagnosis: Diagnosis) -> int:
        """Train the members longer, and return for how many epochs; 0 if there is no time."""
        epochs, seconds = self.config.epochs, diagnosis.epoch_seconds
        if self.seconds is not None and seconds:
            epochs = min(epochs, int(LONGER * self._left() / (seconds * self.members.num_members)))
        if epochs < 1 or not self.members.is_expandable:
            return 0
        self._say(f"training the members {epochs} epochs longer")
        members = copy_network(self.members)
        config = self.config.replace(
            epochs=epochs, warmup_epochs=min(self.config.warmup_epochs, epochs), task=self.task
        )
        path = self.store.path("members", f"longer {epochs}")
        if path is not None and path.exists():
            members, self.resumed = self.store.load(path, members), self.resumed + 1
        else:
            checkpoint = None if path is None else checkpoint_of(path)
            if checkpoint is not None:
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
            try:
                fit(members, self.data, config=config, checkpoint=checkpoint, on_epoch=self._guard, quiet=self.quiet)
            except OutOfTime:
                return 0
            self.store.save(members, path)
        self._add_given(diagnosis)
        self.members = members.eval()  # type: ignore[assignment]
        self.store.identity = self._identity()
        return epochs

    def _add_given(self, diagnosis: Diagnosis) -> None:
        """Add the members before further training to the table."""
        found = predict(self.members, self.data.val, task=self.task)
        best = all_scores(found.member(diagnosis.best_member))
        network = copy_network(self.members.member(diagnosis.best_member)) if self._allows(1, 1) else None
        count = found.num_members
        given = (
            (f"ensemble of {count}, as given", all_scores(found), float(count), None),
            ("best member, as given", best, 1.0, network),
        )
        for name, scores, cost, own in given:
            self.trials.append(
                Trial(name, "", scores, float("nan"), cost, 0, 0.0, "", "reference", size=cost, network=own)
            )

    def _add_references(self, setting: Setting, found: RowPredictions) -> None:
        """Add the mean member, the best member and the ensemble to the table."""
        diagnosis, count = setting.diagnosis, found.num_members
        metrics = metrics_for(found)
        each = [found.member(index) for index in range(count)]
        mean = {name: sum(metric(one) for one in each) / len(each) for name, metric in metrics.items()}
        ensemble = all_scores(found)
        network = setting.best_member() if setting.has_networks else None
        criterion = getattr(self.task, "criterion", "nll")
        self.scores = Scores(self.data, self.task, criterion, mean, ensemble, network)
        self.trials = [replace(trial, gain=self.scores.gain(trial.scores)) for trial in self.trials]
        best = {name: metric(each[diagnosis.best_member]) for name, metric in metrics.items()}
        cost, size = self.scores.cost(self.members), self.scores.size(self.members)
        members = copy_network(self.members) if self._allows(cost, size) else None
        rows = (
            ("mean member", mean, 1.0, 1.0, None),
            (f"ensemble of {count}", ensemble, cost, size, members),
            ("best member", best, 1.0, 1.0, network if self._allows(1, 1) else None),
        )
        for name, scores, passes, bytes_, own in rows:
            gain = self.scores.gain(scores)
            self.trials.append(Trial(name, "", scores, gain, passes, 0, 0.0, "", "reference", size=bytes_, network=own))
        self.best = best

    # Trials

    def _routes(self, setting: Setting, found: RowPredictions, merged: nn.Module | None = None) -> list[Route]:
        """Return the routes that train something, most promising first."""
        if setting.members.num_members < 2:
            return []
        expensive = self.effort == "all"
        routes = list(find_distillations(setting, merged, expensive=expensive))
        return [*routes[:2], *find_ensembles(setting, found, expensive=expensive), *routes[2:]]

    def _require_budget(self, setting: Setting, found: RowPredictions) -> None:
        """Drop what does not meet the budget before it is trained.

        Raises:
            EnfoldError: If nothing meets it.
        """
        self.dropped: dict[str, Trial] = {}
        if self.members.num_members < 2:
            return
        for route in self._routes(setting, found):
            if route.name in self.dropped or (route.student is None and route.blank is None):
                continue
            blank = route.blank_model(setting)
            cost, size = self.scores.cost(blank), self.scores.size(blank)
            if not self._allows(cost, size):
                nan = float("nan")
                note = self._above()
                self.dropped[route.name] = Trial(
                    route.name, route.idea, {}, nan, cost, 0, 0.0, note, route.kind, size=size
                )
        self.trials += self.dropped.values()
        names = [route.name for route in self._routes(setting, found)]
        if names and all(name in self.dropped for name in names) and not self._candidates():
            self._refuse()

    def _above(self) -> str:
        limits = f"{self.budget:g}x" + (f" and {self.memory:g}x memory" if self.memory < float("inf") else "")
        return f"above the budget of {limits}"

    def _refuse(self) -> None:
        known = [trial for trial in self.trials if trial.note.startswith("above") or trial.kind != "reference"]
        cheapest = min(known or self.trials, key=lambda trial: (trial.cost, trial.size))
        raise EnfoldError(
            f"no network meets the budget of {self._above().removeprefix('above the budget of ')}, the cheapest, "
            f"`{cheapest.name}`, has {cheapest.cost:.2f}x and {cheapest.size:.2f}x the size: raise budget, or pass a "
            "smaller student="
        )

    def _allows(self, cost: float, size: float) -> bool:
        return cost <= ROUNDING * self.budget and size <= ROUNDING * self.memory

    def _train(self, setting: Setting, found: RowPredictions) -> None:
        """Train routes in rounds, the best for all epochs, beside the controls."""
        routes = [
            route for route in self._routes(setting, found, self._good_merge(setting)) if route.name not in self.dropped
        ]
        controls = self._controls(setting)
        number, epochs = self._plan(setting, routes, len(controls))
        self.left_out = tuple(route.name for route in routes[number:])
        routes = routes[:number]
        first: list[Route] = routes
        for each in make_rounds(len(routes), epochs):
            tried = [(self._loss(self._try(route, setting, each.epochs), setting), route) for route in first]
            first = [route for _, route in sorted(tried, key=lambda pair: pair[0])][: each.kept]
        finalist = first[:1]
        started = clock.monotonic()
        self._final(setting, finalist, controls, epochs)
        duration = clock.monotonic() - started
        if self.seconds is not None and 1.2 * LONG * duration < self._left():
            self._final(setting, finalist, controls, LONG * epochs)

    def _final(self, setting: Setting, finalist: list[Route], controls: dict[str, Control], epochs: int) -> None:
        for name, (idea, make) in controls.items():
            self._record(Route(name, idea), setting, epochs, partial(make, epochs), "control")
        for route in finalist:
            self._try(route, setting, epochs)

    def _controls(self, setting: Setting) -> dict[str, Control]:
        """Return the trainings on labels that routes are compared with, by name."""
        if not setting.has_networks or not self._allows(1, 1):
            return {}

        def control(epochs: int, checkpoint: Path | None) -> nn.Module:
            return train_control(
                setting.best_member(),
                self.data,
                config=setting.settings(epochs),
                checkpoint=checkpoint,
                on_epoch=self._guard,
                title="control",
                quiet=self.quiet,
            )

        def refit(epochs: int, checkpoint: Path | None) -> nn.Module:
            network = initialize_member(setting.best_member(), self.config.seed, -1, trained=True)[0]
            config = setting.settings(epochs)
            fit(
                network,
                self.data,
                config=config,
                checkpoint=checkpoint,
                on_epoch=self._guard,
                title="refit",
                quiet=self.quiet,
            )
            return network

        found: dict[str, Control] = {"control": ("one member trained as long on the labels", control)}
        if setting.folds is not None:
            found["refit"] = ("one network refitted on all data", refit)
        return found

    def _good_merge(self, setting: Setting) -> nn.Module | None:
        """Return the best merge if it is closer to a member than to chance, as a start of a distillation."""
        merges = [trial for trial in self.trials if trial.kind == "merge" and trial.is_candidate]
        best = min(merges, key=lambda trial: self._loss(trial, setting), default=None)
        if best is None or self._loss(best, setting) > CLOSE * setting.diagnosis.mean_member:
            return None
        return best.network

    def _plan(self, setting: Setting, routes: list[Route], controls: int) -> tuple[int, int]:
        """Return how many routes are tried and for how many epochs, from the time that one epoch takes."""
        epochs = self.config.epochs
        if self.seconds is None or not epochs or not routes:
            return len(routes), epochs
        names = [route.name for route in routes]
        detail = f"{self.seconds} {self.budget} {self.memory} {names} {self.config.changes()}"
        stored = self.store.read_plan(detail)
        if stored is not None:
            return int(stored["routes"]), int(stored["epochs"])
        before = clock.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnchangedWarning)  # its result is not used
            routes[0].run(setting, 1, quiet=True)
        units = PART * self._left() / (clock.monotonic() - before)
        number, epochs = plan_epochs([route.effort for route in routes], epochs, controls, units)
        self.store.write_plan(detail, {"routes": number, "epochs": epochs})
        return number, epochs

    def _left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.seconds is None else self.seconds - (clock.monotonic() - self.started)

    def _guard(self, record: Epoch) -> None:
        """Stop a training whose next epoch would exceed the limit by more than half."""
        if self._left() < record.seconds / 2:
            raise OutOfTime

    def _try(self, route: Route, setting: Setting, epochs: int) -> Trial:
        def make(checkpoint: Path | None) -> nn.Module:
            return route.run(setting, epochs, on_epoch=self._guard, checkpoint=checkpoint, quiet=self.quiet)

        return self._record(route, setting, epochs, make, route.kind)

    def _record(
        self, route: Route, setting: Setting, epochs: int, make: Callable[[Path | None], nn.Module], kind: str
    ) -> Trial:
        """Run one trial, or take it from the folder, and add it to the table; a failure is a row with its reason."""
        before, note, network = clock.monotonic(), "", None
        path = self.store.path(route.name, f"{epochs} {self.config.changes()}")
        try:
            if self._left() <= 0:
                raise OutOfTime
            if path is not None and path.exists():
                network, self.resumed = self.store.load(path, route.blank_model(setting)), self.resumed + 1
            else:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UnchangedWarning)  # the table says so
                    network = make(None if path is None else checkpoint_of(path))
                self.store.save(network, path)
        except OutOfTime:
            note = "stopped: out of time"
        except (EnfoldError, NotImplementedError, RuntimeError) as error:
            note = f"failed: {str(error).split(': ')[0]}"
        seconds = clock.monotonic() - before
        trial = Trial(route.name, route.idea, {}, float("nan"), 1.0, epochs, seconds, note, kind)
        if network is not None:
            trial = self._scored(trial, network)
        self.trials.append(trial)
        shown = trial.scores.get(setting.diagnosis.criterion)
        self._say(f"{trial.name}: {note or f'{setting.diagnosis.criterion.upper()} {shown:.4f}, {seconds:.0f} s'}")
        return trial

    def _scored(self, trial: Trial, network: nn.Module) -> Trial:
        scores = self.scores.of(network)
        cost, size = self.scores.cost(network), self.scores.size(network)
        fits = self._allows(cost, size)
        note = "" if fits else self._above()
        criterion = self.scores.criterion
        own, best = scores.get(criterion, math.nan), self.best.get(criterion, 0.0)
        if fits and trial.epochs and math.isclose(own, best, rel_tol=1e-5):
            note = "unchanged, no epoch was better than the start"
        shipped = network if fits else None
        gain = self.scores.gain(scores)
        return replace(trial, scores=scores, gain=gain, cost=cost, size=size, network=shipped, note=note)

    def _identity(self) -> str:
        """Return a digest of everything that all trials depend on."""
        with torch.random.fork_rng(devices=[]):
            students = [repr(each.make()) for each in self.students]
        base = (
            [] if self.base is None else [each for each in self.base.state_dict().values() if isinstance(each, Tensor)]
        )
        state = [each for each in self.members.state_dict().values() if isinstance(each, Tensor)]
        values = [*state, *base, *([] if self.folds is None else [self.folds])]
        return digest(values, f"{students}{self.base!r}{content(self.data, ('train', 'val'))}")

    # Choice

    def _candidates(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.is_candidate]

    def _loss(self, trial: Trial, setting: Setting) -> float:
        return trial.scores.get(setting.diagnosis.criterion, float("inf"))

    def _choose(self, diagnosis: Diagnosis, found: RowPredictions, longer: int) -> Compression:
        candidates = self._candidates()
        if not candidates:
            self._refuse()
        chosen = min(candidates, key=lambda trial: (trial.scores.get(diagnosis.criterion, math.inf), trial.cost))
        return Compression(
            chosen,
            self.trials,
            diagnosis,
            found.headline,
            frozenset(name for name, metric in metrics_for(found).items() if metric.unit == "%"),
            self.budget,
            self.memory,
            self.members,
            longer,
            self.left_out,
            self.resumed,
        )

    def _say(self, text: str) -> None:
        if not self.quiet:
            left = "" if self.seconds is None else f"  {max(0, self._left()):.0f} s left"
            print(f"compress: {text}{left}", file=sys.stderr, flush=True)


def _for_one(config: TrainConfig, member: int) -> TrainConfig:
    """Return the settings of a member for a student, which learns from all examples."""
    names = ("lr", "weight_decay", "label_smoothing")
    own = {name: value[member] for name in names if isinstance(value := getattr(config, name), tuple)}
    return config.replace(folds=None, bootstrap=False, **own)
