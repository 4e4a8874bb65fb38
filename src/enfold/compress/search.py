"""The search of compress: diagnose, try merges, train in rounds, choose on validation examples."""

from __future__ import annotations

import math
import time as clock
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from enfold.compress.diagnosis import Diagnosis, diagnose
from enfold.compress.members import Student
from enfold.compress.merges import find_merges
from enfold.compress.parallel import Trials
from enfold.compress.result import Compression, Trial
from enfold.compress.routes import Route, Setting, keep
from enfold.compress.runner import OutOfTime, Runner
from enfold.compress.schedule import LONG, LONGEST, count_epochs, make_rounds, plan_epochs
from enfold.compress.scores import CALIBRATED, Scores, all_scores, rank
from enfold.compress.store import checkpoint_of
from enfold.compress.trainings import Control, find_routes, make_controls
from enfold.data import Data
from enfold.data.content import content
from enfold.distill.answers import Answers, shared_answers
from enfold.engines.copying import copy_network
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import predict
from enfold.executors import Parallel
from enfold.io.files import digest
from enfold.metrics import metrics_for
from enfold.metrics.predictions import RowPredictions
from enfold.tasks import Task
from enfold.train import TrainConfig, fit

Effort = Literal["default", "all"]
PART = 0.85  # of the time that is left is planned for trainings
LONGER = 0.4  # of it may be spent on training the members longer
CLOSE = 1.5  # a distillation starts from a merge whose loss is at most this multiple of the mean member's


@dataclass
class Search:
    """The state of one search.

    Args:
        runner: What runs the trials.
        members: The ensemble.
        data: Training and validation examples.
        task: What the outputs mean.
        config: Settings of training; `folds` are used only if the members are trained longer.
        students: Networks of other architectures to distil into.
        base: The network that the members were fine-tuned from.
        folds: Which member was trained on which example.
        effort: "default", or "all" to include expensive routes.
        left_out: Names of routes that there is no time for.
        parallel: Where the trials of a round are trained; None for one after the other in this process.
    """

    runner: Runner
    members: Ensemble
    data: Data
    task: Task
    config: TrainConfig
    students: tuple[Student, ...] = ()
    base: nn.Module | None = None
    folds: Tensor | None = None
    effort: Effort = "default"
    left_out: tuple[str, ...] = ()
    parallel: Parallel | None = None

    def run(self, *, train_longer: bool = False) -> Compression:
        """Diagnose the members, try the routes, and return the result.

        Args:
            train_longer: Whether to train members that are not fully trained longer first.
        """
        runner = self.runner
        runner.store.identity = self._identity()
        runner.say("diagnosing the members")
        self._log_settings()
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
            runner.budget,
            runner.memory,
        )
        found = predict(self.members, self.data.val, task=self.task)
        self._add_references(setting, found)
        self._drop_expensive(setting, found)
        for route in find_merges(setting, expensive=self.effort == "all"):
            runner.run_route(route, setting, 0)
        with shared_answers(Answers()):  # routes differ in losses and starts, short trainings are parts of long ones
            self._train(setting, found)
        return self._choose(diagnosis, found, longer)

    def _identity(self) -> str:
        """Return a digest of everything that all trials depend on."""
        with torch.random.fork_rng(devices=[]):
            students = [repr(each.make()) for each in self.students]
        models = [self.members, *([] if self.base is None else [self.base])]
        values = [each for model in models for each in model.state_dict().values() if isinstance(each, Tensor)]
        values += [] if self.folds is None else [self.folds]
        return digest(values, f"{students}{self.base!r}{content(self.data, ('train', 'val'))}")

    def _log_settings(self) -> None:
        log, runner = self.runner.log, self.runner
        if not log:
            return
        given = {each: getattr(self.config, each) for each in vars(self.config)}
        members = {"model": type(self.members).__name__, "num_members": self.members.num_members}
        limits = {"budget": runner.budget, "time": runner.limit.seconds, "data": self.data.source}
        log.log_settings({"title": "compress", **members, **limits, **given})

    # Members

    def _train_longer(self, diagnosis: Diagnosis) -> int:
        """Train the members longer, and return for how many epochs; 0 if there is no time."""
        epochs, seconds, runner = self.config.epochs, diagnosis.epoch_seconds, self.runner
        if runner.limit.seconds is not None and seconds:
            epochs = min(epochs, int(LONGER * runner.limit.left() / (seconds * self.members.num_members)))
        if epochs < 1 or not self.members.is_expandable:
            return 0
        runner.say(f"training the members {epochs} epochs longer")
        members = copy_network(self.members)
        warmup = min(self.config.warmup_epochs, epochs)
        config = self.config.replace(epochs=epochs, warmup_epochs=warmup, task=self.task)
        path = runner.store.path("members", f"{config.changes()}")
        if path is not None and path.exists():
            members, runner.resumed = runner.store.load(path, members), runner.resumed + 1
        else:
            try:
                fit(
                    members,
                    self.data,
                    config=config,
                    checkpoint=checkpoint_of(path),
                    on_epoch=runner.guard,
                    logger=runner.part("members", epochs),
                    title="members",
                    quiet=runner.quiet,
                )
            except OutOfTime:
                return 0
            runner.store.save(members, path)
        self._add_given(diagnosis)
        self.members = members.eval()  # type: ignore[assignment]
        runner.store.identity = self._identity()
        return epochs

    def _add_given(self, diagnosis: Diagnosis) -> None:
        """Add the members before further training to the table."""
        found, index = predict(self.members, self.data.val, task=self.task), diagnosis.best_member
        network = copy_network(self.members.member(index)) if self.runner.allows(1, 1) else None
        count = found.num_members
        for name, scores, cost, own in (
            (f"ensemble of {count}, as given", all_scores(found), float(count), None),
            ("best member, as given", all_scores(found.member(index)), 1.0, network),
        ):
            row = Trial(name, "", scores, float("nan"), cost, 0, 0.0, "", "reference", size=cost, network=own)
            self.runner.trials.append(row)

    def _add_references(self, setting: Setting, found: RowPredictions) -> None:
        """Add the mean member, the best member and the ensemble to the table."""
        runner, count = self.runner, found.num_members
        each = [all_scores(found.member(index)) for index in range(count)]
        mean = {name: sum(one[name] for one in each) / count for name in each[0]}
        ensemble, best = all_scores(found), each[setting.diagnosis.best_member]
        network = setting.best_member() if setting.has_networks else None
        criterion = getattr(self.task, "criterion", "nll")
        scores = Scores(self.data, self.task, criterion, mean, ensemble, network)
        runner.set_scores(scores, best)
        runner.trials = [replace(trial, gain=scores.gain(trial.scores)) for trial in runner.trials]
        cost, size = scores.cost(self.members), scores.size(self.members)
        members = copy_network(self.members) if runner.allows(cost, size) else None
        for name, own, passes, bytes_, shipped in (
            ("mean member", mean, 1.0, 1.0, None),
            (f"ensemble of {count}", ensemble, cost, size, members),
            ("best member", best, 1.0, 1.0, network if runner.allows(1, 1) else None),
        ):
            gain, calibrated = scores.gain(own), scores.calibrated_gain(own)
            row = Trial(name, "", own, gain, passes, 0, 0.0, "", "reference", size=bytes_, network=shipped)
            runner.add(replace(row, calibrated_gain=calibrated))

    # Trainings

    def _drop_expensive(self, setting: Setting, found: RowPredictions) -> None:
        """Drop what does not meet the budget before it is trained.

        Raises:
            EnfoldError: If nothing meets it.
        """
        runner, routes = self.runner, find_routes(setting, found, expensive=self.effort == "all")
        self.dropped: set[str] = set()
        for route in routes:
            if route.student is None and route.blank is None:
                continue
            blank = route.blank_model(setting)
            cost, size = runner.scores.cost(blank), runner.scores.size(blank)
            if not runner.allows(cost, size):
                note, nan = f"above the budget of {runner.limits}", float("nan")
                self.dropped.add(route.name)
                runner.add(Trial(route.name, route.idea, {}, nan, cost, 0, 0.0, note, route.kind, size=size))
        if routes and self.dropped == {route.name for route in routes} and not self._candidates():
            self._refuse()

    def _refuse(self) -> NoReturn:
        tried = [trial for trial in self.runner.trials if trial.kind != "reference"]
        cheapest = min(tried or self.runner.trials, key=lambda trial: (trial.cost, trial.size))
        raise EnfoldError(
            f"no network meets the budget of {self.runner.limits}, the cheapest, `{cheapest.name}`, has "
            f"{cheapest.cost:.2f}x and {cheapest.size:.2f}x the size: raise budget, or pass a smaller student="
        )

    def _train(self, setting: Setting, found: RowPredictions) -> None:
        """Train routes in rounds, the best for all epochs, beside the controls."""
        runner = self.runner
        merged = self._good_merge(setting)
        if self.parallel is not None:
            self.trials = Trials(runner, setting, found, merged, self.effort == "all", self.parallel)
        routes = find_routes(setting, found, merged, expensive=self.effort == "all")
        routes = [route for route in routes if route.name not in self.dropped]
        controls = make_controls(setting, runner)
        number, epochs = self._plan(setting, routes, len(controls))
        runner.final_epochs = epochs
        self.left_out = tuple(route.name for route in routes[number:])
        routes = routes[:number]
        runner.work.planned = count_epochs([route.effort for route in routes], epochs, len(controls))
        for each in make_rounds(len(routes), epochs):
            self._train_on_executor([route.name for route in routes], each.epochs)
            tried = [(self._loss(runner.run_route(route, setting, each.epochs), setting), route) for route in routes]
            routes = keep([route for _, route in sorted(tried, key=lambda pair: pair[0])], each.kept)
        started, length = clock.monotonic(), 1
        self._final(setting, routes[:1], controls, epochs)
        while runner.limit.seconds is not None and length < LONGEST:
            duration, before = clock.monotonic() - started, self._lowest(setting)
            if 1.2 * LONG * duration > runner.limit.left():
                return
            started, length = clock.monotonic(), LONG * length
            runner.work.planned += length * epochs * (len(controls) + sum(route.effort for route in routes[:1]))
            self._final(setting, routes[:1], controls, length * epochs)
            if self._lowest(setting) >= before:
                return

    def _lowest(self, setting: Setting) -> float:
        """Return the loss of the best network so far."""
        return min((self._loss(trial, setting) for trial in self._candidates()), default=math.inf)

    def _final(self, setting: Setting, finalist: list[Route], controls: dict[str, Control], epochs: int) -> None:
        self._train_on_executor([*controls, *(route.name for route in finalist)], epochs)
        for name, (idea, make) in controls.items():
            self.runner.run(Route(name, idea), setting, epochs, partial(make, epochs), "control")
        for route in finalist:
            self.runner.run_route(route, setting, epochs)

    def _train_on_executor(self, names: list[str], epochs: int) -> None:
        """Train these trials, which are then taken from the folder; without an executor, do nothing."""
        if self.parallel is not None:
            self.trials.train(names, epochs)

    def _good_merge(self, setting: Setting) -> nn.Module | None:
        """Return the best merge if it is closer to a member than to chance, as a start of a distillation."""
        merges = [trial for trial in self._candidates() if trial.kind == "merge"]
        best = min(merges, key=lambda trial: self._loss(trial, setting), default=None)
        criterion = setting.diagnosis.criterion
        if best is None or best.scores.get(criterion, math.inf) > CLOSE * setting.diagnosis.mean_member:
            return None
        return best.network

    def _plan(self, setting: Setting, routes: list[Route], controls: int) -> tuple[int, int]:
        """Return how many routes are tried and for how many epochs, from the time that one epoch takes."""
        epochs, runner = self.config.epochs, self.runner
        if runner.limit.seconds is None or not epochs or not routes:
            return len(routes), epochs
        names = [route.name for route in routes]
        detail = f"{runner.limit.seconds} {runner.limits} {names} {self.config.changes()}"
        stored = runner.store.read_plan(detail)
        if stored is not None:
            return int(stored["routes"]), int(stored["epochs"])
        before = clock.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnchangedWarning)  # its result is not used
            routes[0].run(setting, 1, quiet=True)
        units = PART * runner.limit.left() / (clock.monotonic() - before)
        number, epochs = plan_epochs([route.effort for route in routes], epochs, controls, units)
        runner.store.write_plan(detail, {"routes": number, "epochs": epochs})
        return number, epochs

    # Choice

    def _candidates(self) -> list[Trial]:
        return [trial for trial in self.runner.trials if trial.is_candidate]

    def _loss(self, trial: Trial, setting: Setting) -> float:
        return _loss(trial, setting.diagnosis)

    def _choose(self, diagnosis: Diagnosis, found: RowPredictions, longer: int) -> Compression:
        candidates, runner = self._candidates(), self.runner
        if not candidates:
            self._refuse()
        name = diagnosis.criterion
        alone = [trial for trial in candidates if trial.kind == "control" or trial.name == "best member"]
        most = min((trial.scores.get(name, math.inf) for trial in alone), default=math.inf)
        allowed = [trial for trial in candidates if trial.scores.get(name, math.inf) <= most] or candidates
        chosen = min(allowed, key=lambda trial: (_loss(trial, diagnosis), trial.cost))
        runner.log.log_settings({"recommended": chosen.name})
        return Compression(
            chosen,
            runner.trials,
            diagnosis,
            (*found.headline, *([CALIBRATED] if CALIBRATED in chosen.scores and "nll" in found.headline else [])),
            frozenset(name for name, metric in metrics_for(found).items() if metric.unit == "%"),
            runner.budget,
            runner.memory,
            self.members,
            longer,
            self.left_out,
            runner.resumed,
        )


def _loss(trial: Trial, diagnosis: Diagnosis) -> float:
    return rank(trial.scores, diagnosis.criterion, diagnosis.ensemble)


def _for_one(config: TrainConfig, member: int) -> TrainConfig:
    """Return the settings of a member for a student, which learns from all examples."""
    names = ("lr", "weight_decay", "label_smoothing")
    own = {name: value[member] for name in names if isinstance(value := getattr(config, name), tuple)}
    return config.replace(folds=None, bootstrap=False, **own)
