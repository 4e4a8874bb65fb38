"""compress: try what is promising within a budget, choose on validation examples, and explain the choice."""

from __future__ import annotations

import math
import re
import sys
import time as clock
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from enfold.compress.diagnosis import Diagnosis, diagnose
from enfold.compress.result import Compression, Trial
from enfold.compress.routes import Route, Setting, find_distillations, find_merges
from enfold.cost import flops
from enfold.data import Data, Split
from enfold.data.content import content
from enfold.data.convert import Examples, as_data, first_inputs, require
from enfold.data.dataset import has_examples
from enfold.data.unpack import Unpack
from enfold.distill.control import train_control
from enfold.engines.copying import copy_network
from enfold.ensemble import Ensemble, called_network, set_model_output
from enfold.ensembles.deep_ensemble import DeepEnsemble, as_ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import predict
from enfold.io.files import atomic_path, digest
from enfold.loggers import Log, LoggerLike, as_log, logged
from enfold.metrics import gain_recovered, metrics_for
from enfold.metrics.predictions import RowPredictions
from enfold.tasks import StudentTask, Task, TaskLike, current_task, first_batch_task
from enfold.train import TrainConfig
from enfold.train.config import as_config
from enfold.train.history import Epoch

SHORT = 4  # routes are compared after a fraction 1 / SHORT of the epochs
FINALISTS = 1  # distillations that get all epochs, beside the control
UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


class _OutOfTime(Exception):
    """The wall-clock limit was reached during a training."""


@logged
def compress(
    models: Ensemble | Sequence[nn.Module] | Sequence[str | Path] | str,
    train: Examples,
    val: Examples | None = None,
    *,
    network: Callable[[], nn.Module] | None = None,
    budget: str | float = "1x",
    time: str | float | None = None,
    student: Callable[[], nn.Module] | None = None,
    base: nn.Module | None = None,
    task: TaskLike = None,
    unpack: Unpack | None = None,
    outputs: Callable[[Any], Tensor] | None = None,
    folder: str | Path | None = None,
    config: TrainConfig | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    quiet: bool = False,
    **settings: Any,
) -> Compression:
    """Find the best single network to ship in place of an ensemble.

    Members are diagnosed first. Merges are tried next, then short distillations, of which the best is trained for all
    epochs beside a control: one member that is trained as long on the labels. The network with the lowest criterion on
    validation examples is recommended; it is never worse there than the best member or the control.

    Args:
        models: An ensemble, networks, or checkpoint files for `network`; they are not changed.
        train: Training examples, as for `fit`.
        val: Validation examples, as for `fit`; everything is chosen by them.
        network: Function that makes the network of checkpoint files.
        budget: Largest cost of a prediction relative to one member, such as "1x" or 0.5. Below 1 a `student` is
            needed.
        time: Limit of the search, such as "30 min" or a number of seconds; epochs are shortened to fit. None for no
            limit.
        student: Function that makes a network of another architecture to distil into.
        base: Network that the members were fine-tuned from, for the merges that use it.
        task: What the outputs mean; None for the task that an ensemble was trained for, or to infer it.
        unpack: Function that splits a batch, as for `fit`.
        outputs: Function that selects the output of a network, as for `fit`.
        folder: Folder in which finished trials are stored, so that an interrupted search continues.
        config: Settings of training; use those of the members.
        on_epoch: Called with the record of every epoch of every trial, an `Epoch`; `Epoch.training` is the trial.
        logger: Where settings, the metrics of every trial and the table are logged to, as for `fit`.
        quiet: Show no progress bars.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Returns:
        The network, everything that was tried, and the explanation.

    Raises:
        EnfoldError: If an argument is invalid, there are no validation examples, or nothing meets the budget.
    """
    started = clock.monotonic()
    require(train, "train", "compress")
    limit, seconds = parse_budget(budget), parse_time(time)
    settings_given = as_config(config).update(settings)
    members = _as_members(models, network)
    if outputs is not None:
        set_model_output(members, outputs)
    task = first_batch_task(task or settings_given.task or members.task)
    data = as_data(train, val, batch_size=settings_given.batch_size, unpack=unpack, network=called_network(members))
    if not has_examples(data.val):
        raise EnfoldError("compress chooses on validation examples, got none: pass val=")
    if limit < 1 and student is None:
        raise EnfoldError(
            f"budget must be at least 1x, the cost of the members' architecture, got {budget!r}: raise budget, or pass "
            "student=, a function that makes a smaller network"
        )
    if not members.is_expandable and student is None:
        raise EnfoldError(
            f"student must be given for a {type(members).__name__}, whose members have no common architecture, got "
            "None: pass a function that makes the network to distil into"
        )
    _refuse_identical(members, data, task)
    search = Search(members, data, current_task(task), settings_given, limit, started, seconds, quiet=quiet)
    search.folder = None if folder is None else Path(folder)
    search.on_epoch, search.log = on_epoch, as_log(logger)
    return search.run(student, base)


@dataclass
class Search:
    """The state of one search."""

    members: Ensemble
    data: Data
    task: Task
    config: TrainConfig
    budget: float
    started: float
    seconds: float | None
    quiet: bool = False
    folder: Path | None = None
    trials: list[Trial] = field(default_factory=list)
    inputs: str = ""  # what identifies the student and the base
    on_epoch: Callable[[Epoch], None] | None = None
    log: Log = field(default_factory=Log)
    final_epochs: int = 0

    def run(self, student: Callable[[], nn.Module] | None, base: nn.Module | None = None) -> Compression:
        """Diagnose the members, try the routes, and return the result."""
        with torch.random.fork_rng(devices=[]):
            self.inputs = f"{None if student is None else student()!r}"
        values = [] if base is None else [each for each in base.state_dict().values() if isinstance(each, Tensor)]
        self.inputs += digest(values, repr(base))
        self._say("diagnosing the members")
        self._log_settings()
        diagnosis = diagnose(self.members, self.data, self.task, self.config)
        setting = Setting(self.members, self.data, self.task, self.config, diagnosis, student, base)
        self._add_references(diagnosis)
        for route in find_merges(setting):
            self._try(route, setting, 0, kind="merge")
        self._distil(setting)
        return self._choose(diagnosis)

    # Trials

    def _distil(self, setting: Setting) -> None:
        routes = list(find_distillations(setting, self._good_merge(setting)))
        if self.members.num_members < 2:
            routes = []
        epochs = self._affordable(setting, len(routes))
        short, self.final_epochs = max(1, epochs // SHORT), epochs
        first = [self._try(route, setting, short) for route in routes] if len(routes) > 1 and epochs > 1 else []
        ranked = sorted(
            zip(first, routes, strict=True) if first else [], key=lambda pair: self._loss(pair[0], setting.diagnosis)
        )
        finalists = [route for _, route in ranked[:FINALISTS]] or routes[:1]
        for trial in first:  # short trainings only rank the routes
            self.trials[self.trials.index(trial)] = replace(trial, note=_join(f"{short} epochs", trial.note))
        self._try_control(setting, epochs)
        for route in finalists:
            self._try(route, setting, epochs)

    def _good_merge(self, setting: Setting) -> nn.Module | None:
        """Return the best merge if it is closer to a member than to chance, as a start of a distillation."""
        merges = [trial for trial in self.trials if trial.kind == "merge" and trial.is_candidate]
        best = min(merges, key=lambda trial: self._loss(trial, setting.diagnosis), default=None)
        diagnosis = setting.diagnosis
        if best is None or self._loss(best, diagnosis) > 1.5 * diagnosis.mean_member:
            return None
        return best.network

    def _affordable(self, setting: Setting, routes: int) -> int:
        """Return the epochs that fit into the time limit, measured by one epoch of the first route."""
        if self.seconds is None or not self.config.epochs:
            return self.config.epochs
        before = clock.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnchangedWarning)  # its result is not used
            next(find_distillations(setting)).run(setting, 1, quiet=True)
        epoch = clock.monotonic() - before
        # A mixed epoch costs about as much; the control costs less.
        share = routes / SHORT + FINALISTS + 1
        affordable = int(0.85 * self._left() / (epoch * share))
        return max(1, min(self.config.epochs, affordable))

    def _left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.seconds is None else self.seconds - (clock.monotonic() - self.started)

    def _guard(self, record: Epoch) -> None:
        if self.on_epoch is not None:
            self.on_epoch(record)
        if self._left() <= 0:
            raise _OutOfTime

    def _try(self, route: Route, setting: Setting, epochs: int, kind: str = "distillation") -> Trial:
        def make(checkpoint: Path | None) -> nn.Module:
            log = self._part(route.name, epochs)
            return route.run(setting, epochs, on_epoch=self._guard, logger=log, checkpoint=checkpoint, quiet=self.quiet)

        return self._record(route.name, route.idea, kind, epochs, make, setting.student)

    def _try_control(self, setting: Setting, epochs: int) -> None:
        if not self.members.is_expandable:
            return

        def make(checkpoint: Path | None) -> nn.Module:
            config = self.config.replace(epochs=epochs, warmup_epochs=min(self.config.warmup_epochs, epochs))
            config = config.replace(task=self.task)
            return train_control(
                self.members,
                self.data,
                config=config,
                checkpoint=checkpoint,
                on_epoch=self._guard,
                logger=self._part("control", epochs),
                title="control",
                quiet=self.quiet,
            )

        self._record("control", "one member trained as long on the labels", "control", epochs, make, None)

    def _record(
        self,
        name: str,
        idea: str,
        kind: str,
        epochs: int,
        make: Callable[[Path | None], nn.Module],
        student: Callable[[], nn.Module] | None,
    ) -> Trial:
        """Run one trial, or take it from the folder, and add it to the table; a failure is a row with its reason."""
        before, note, network = clock.monotonic(), "", None
        stored = None if self.folder is None else self.folder / f"{_slug(name)}-{self._key(name, epochs)}.safetensors"
        try:
            if self._left() <= 0:
                raise _OutOfTime
            if stored is not None and stored.exists():
                network = self._load(stored, student)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UnchangedWarning)  # the table says so
                    network = make(None if stored is None else stored.with_suffix(".checkpoint"))
                self._store(network, stored)
                if stored is not None:
                    stored.with_suffix(".checkpoint").unlink(missing_ok=True)
        except _OutOfTime:
            note = "stopped: out of time"
        except (EnfoldError, NotImplementedError, RuntimeError) as error:
            note = f"failed: {str(error).split(': ')[0]}"
        seconds = clock.monotonic() - before
        trial = Trial(name, idea, {}, float("nan"), 1.0, epochs, seconds, note, kind)
        if network is not None:
            trial = self._scored(trial, network)
        self._add(trial)
        self._say(f"{name}: {note or 'done'}")
        return trial

    def _scored(self, trial: Trial, network: nn.Module) -> Trial:
        found = predict(network.eval(), self.data.val, task=StudentTask(teacher=self.task))
        scores = {name: metric(found) for name, metric in metrics_for(found).items()}
        cost = self._cost(network)
        fits = cost <= 1.001 * self.budget
        note = "" if fits else f"above the budget of {self.budget:g}x"
        if (
            fits
            and trial.epochs
            and math.isclose(scores[found.criterion], self._best.get(found.criterion, 0.0), rel_tol=1e-5)
        ):
            note = "unchanged, no epoch was better than the start"
        return replace(
            trial, scores=scores, gain=self._gain(scores), cost=cost, network=network if fits else None, note=note
        )

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        if self.log and trial.scores:
            values = {**trial.scores, "gain": trial.gain, "cost": trial.cost, "seconds": trial.seconds}
            results = {f"result/{name}": value for name, value in values.items()}
            self._part(trial.name, trial.epochs).log_metrics(results, trial.epochs)

    def _part(self, name: str, epochs: int) -> Log:
        """Return the log of a trial; a short training that ranks the routes has its own."""
        is_short = epochs and epochs < self.final_epochs
        return self.log.part(f"short-{_slug(name)}" if is_short else _slug(name))

    def _log_settings(self) -> None:
        if not self.log:
            return
        given = {each: getattr(self.config, each) for each in vars(self.config)}
        members = {"model": type(self.members).__name__, "num_members": self.members.num_members}
        limits = {"budget": self.budget, "time": self.seconds, "data": self.data.source}
        self.log.log_settings({"title": "compress", **members, **limits, **given})

    def _store(self, network: nn.Module, path: Path | None) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
        with atomic_path(path) as temporary:
            save_file(state, temporary)

    def _load(self, path: Path, student: Callable[[], nn.Module] | None) -> nn.Module:
        network = student() if student is not None else self.members.member(0)
        network.load_state_dict(load_file(path))
        return network.eval()

    def _key(self, name: str, epochs: int) -> str:
        """Return a digest of everything that a trial depends on."""
        state = [value for value in self.members.state_dict().values() if isinstance(value, Tensor)]
        identity = {"data": content(self.data, ("train", "val")), "config": self.config.changes(), "epochs": epochs}
        return digest(state, f"{name}{identity}{self.inputs}")[:16]

    # Scores

    def _add_references(self, diagnosis: Diagnosis) -> None:
        """Add the mean member, the best member and the ensemble to the table."""
        found: RowPredictions = predict(self.members, self.data.val, task=self.task)
        metrics = metrics_for(found)
        each = [found.member(index) for index in range(found.num_members)]
        mean = {name: sum(metric(one) for one in each) / len(each) for name, metric in metrics.items()}
        self._references = (mean, {name: metric(found) for name, metric in metrics.items()})
        self._metrics = metrics
        self._headline = found.headline
        best = self._best = {name: metric(each[diagnosis.best_member]) for name, metric in metrics.items()}
        is_network = self.members.is_expandable or isinstance(self.members, MixedEnsemble)
        network = copy_network(self.members.member(diagnosis.best_member)) if is_network else None
        rows = (
            ("mean member", mean, 1.0, None),
            (f"ensemble of {found.num_members}", self._references[1], float(found.num_members), None),
            ("best member", best, 1.0, network if self.budget >= 1 else None),
        )
        for name, scores, cost, own in rows:
            self._add(Trial(name, "", scores, self._gain(scores), cost, 0, 0.0, "", "reference", own))

    def _gain(self, scores: dict[str, float]) -> float:
        mean, ensemble = self._references
        criterion = next(name for name in (self._criterion, "mse", "nll") if name in scores and name in ensemble)
        return gain_recovered(scores[criterion], mean[criterion], ensemble[criterion], higher_is_better=False)

    @property
    def _criterion(self) -> str:
        return getattr(self.task, "criterion", "nll")

    def _cost(self, network: nn.Module) -> float:
        """Return the operations of a prediction relative to one member."""
        if not self.members.is_expandable and not isinstance(self.members, MixedEnsemble):
            return 1.0
        member = self.members.member(0)
        shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (network, member)]
        if type(network) is type(member) and shapes[0] == shapes[1]:
            return 1.0
        inputs = self._example()
        try:
            return flops(network, inputs) / flops(member, inputs)
        except (ZeroDivisionError, RuntimeError, TypeError):  # operations that are not counted
            sizes = [sum(p.numel() for p in each.parameters()) for each in (network, member)]
            return sizes[0] / max(1, sizes[1])

    def _example(self) -> Any:
        if isinstance(self.data.train, Split):
            return self.data.prepare(self.data.train.inputs[:2])
        return first_inputs(self.data.train)

    def _loss(self, trial: Trial, diagnosis: Diagnosis) -> float:
        return trial.scores.get(diagnosis.criterion, float("inf"))

    def _choose(self, diagnosis: Diagnosis) -> Compression:
        candidates = [trial for trial in self.trials if trial.is_candidate]
        if not candidates:
            costs = [trial.cost for trial in self.trials if trial.scores and trial.kind != "reference"]
            cheapest = f"{min(costs):.2f}x" if costs else "1x"
            raise EnfoldError(
                f"no network meets the budget of {self.budget:g}x, the cheapest has {cheapest}: raise budget, or pass "
                "a smaller student="
            )
        chosen = min(candidates, key=lambda trial: self._loss(trial, diagnosis))
        self.log.log_settings({"recommended": chosen.name})
        percent = frozenset(name for name, metric in self._metrics.items() if metric.unit == "%")
        return Compression(chosen, self.trials, diagnosis, self._headline, percent, self.budget)

    def _say(self, text: str) -> None:
        if not self.quiet:
            left = "" if self.seconds is None else f"  {max(0, self._left()):.0f} s left"
            print(f"compress: {text}{left}", file=sys.stderr, flush=True)


def parse_budget(budget: str | float) -> float:
    """Return the budget as a factor on the cost of one member.

    Raises:
        EnfoldError: If it is not a positive number such as "1x" or 0.5.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*x?\s*", str(budget)) if not isinstance(budget, bool) else None
    if match is None or not float(match[1]) > 0:
        raise EnfoldError(f'budget must be a positive factor such as "1x" or 0.5, got {budget!r}: change budget')
    return float(match[1])


def parse_time(limit: str | float | None) -> float | None:
    """Return a duration in seconds.

    Raises:
        EnfoldError: If it is not a positive duration such as "30 min", "2h" or a number of seconds.
    """
    if limit is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", str(limit)) if not isinstance(limit, bool) else None
    unit = "" if match is None else match[2].removesuffix("s") or "s"
    if match is None or unit not in UNITS or not float(match[1]) > 0:
        raise EnfoldError(
            f'time must be a duration such as "30 min" or a number of seconds, got {limit!r}: change time'
        )
    return float(match[1]) * UNITS[unit]


def _as_members(models: Any, network: Callable[[], nn.Module] | None) -> Ensemble:
    if isinstance(models, Ensemble):
        return models
    is_file = isinstance(models, str | Path)
    files = [models] if is_file else list(models) if isinstance(models, Sequence) else []
    if files and all(isinstance(each, str | Path) for each in files):
        if network is None:
            raise EnfoldError("network must be given for checkpoint files, got None: pass a function that makes it")
        return DeepEnsemble.from_checkpoints(models if is_file else files, network)
    if not files or not all(isinstance(each, nn.Module) for each in files):
        raise EnfoldError(
            f"models must be an ensemble, networks or checkpoint files, got {type(models).__name__}: pass "
            "DeepEnsemble([a, b, c])"
        )
    if len(files) < 2:
        raise EnfoldError("models must be at least 2 networks, got one network: pass the members of an ensemble")
    try:
        return as_ensemble(files)
    except EnfoldError:  # networks of different architectures
        return MixedEnsemble(files)


def _refuse_identical(members: Ensemble, data: Data, task: Task) -> None:
    """Refuse members that are one network, from which nothing can be gained; it also infers the task."""
    found = predict(members, data.val, task=task)
    values = getattr(found, "log_probs", None)
    values = getattr(found, "means", values) if values is None else values
    if found.num_members > 1 and isinstance(values, Tensor) and bool((values == values[:1]).all()):
        raise EnfoldError(
            f"models must differ, got {found.num_members} members with identical outputs: pass members that were "
            "trained with different seeds"
        )


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
