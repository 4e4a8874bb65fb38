"""The training loop of single networks, ensembles and students."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.convert import has_targets
from enfold.data.dataset import Split, has_examples
from enfold.engines.inputs import refuse_shape
from enfold.engines.modes import is_sharded
from enfold.engines.precision import autocast
from enfold.ensemble import Ensemble, set_model_task
from enfold.errors import EnfoldError, NonFiniteLoss
from enfold.evaluate import predict
from enfold.io.checkpoints import require_tensors
from enfold.io.stopping import Stop, stops_by_itself
from enfold.loggers import Log
from enfold.metrics import calibrated_nll, metrics_for, per_member
from enfold.progress import ProgressBar, progress
from enfold.seeds import derive
from enfold.tasks import Task, as_task, known_task
from enfold.train.backward import backward
from enfold.train.batch_norm import several_examples
from enfold.train.checkpoint import Place, read_checkpoint, save_checkpoint
from enfold.train.config import TrainConfig
from enfold.train.data_parallel import DataParallel
from enfold.train.diversity import warn_if_similar
from enfold.train.history import Epoch, HasFigures, History
from enfold.train.identity import initial_weights, record_end, training_identity
from enfold.train.objective import HasDivergence, Objective, StepContext, default_loss
from enfold.train.optimize import Optimizer, trained_members
from enfold.train.selection import Selection
from enfold.train.trajectory import Trajectory
from enfold.train.weight_average import WeightAverage


def train_model(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    objective: Objective | None = None,
    checkpoint: Path | None = None,
    *,
    on_epoch: Callable[[Epoch], None] | None = None,
    log: Log | None = None,
    title: str = "training",
    quiet: bool = False,
    evaluated_model: Callable[[nn.Module], nn.Module] | None = None,
    trajectory: Trajectory | None = None,
) -> History:
    """Train a model in this process; the arguments are those of `enfold.fit`, converted.

    Args:
        model: A network or an ensemble.
        data: Training and validation examples.
        config: Settings of the training, with its task.
        objective: The loss to minimize; None for that of the ensemble or the task.
        checkpoint: File to save to and resume from.
        on_epoch: Function called with the record of every epoch.
        log: Where settings and metrics are logged to.
        title: Title of the progress bar.
        quiet: Show no progress bar.
        evaluated_model: Function that maps the model to the one that is evaluated on validation examples.
        trajectory: Where the networks are saved during training.
    """
    log = Log() if log is None else log
    if isinstance(model, Ensemble):
        config = model.configure(config)
        if objective is None:
            history = model.fit_members(
                data, config, checkpoint=checkpoint, title=title, quiet=quiet, on_epoch=on_epoch, logger=log
            )
            if history is not None:
                _record_task(model, as_task(config.task))
                return history
            objective = model.objective(config)
    with torch.enable_grad():
        training = Fit(model, data, config, objective, checkpoint, evaluated_model, trajectory)
        try:
            return training.run(on_epoch, title, quiet, log)
        finally:
            if checkpoint is not None:
                record_end(model)


class Fit:
    """The state of one training."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        config: TrainConfig,
        objective: Objective | None,
        checkpoint: Path | None,
        evaluated_model: Callable[[nn.Module], nn.Module] | None = None,
        trajectory: Trajectory | None = None,
    ) -> None:
        self.evaluated_model, self.trajectory = evaluated_model or (lambda model: model), trajectory
        self.model, self.data, self.config, self.checkpoint = model.to(config.device), data, config, checkpoint
        num_members = trained_members(model)
        self.task = as_task(config.task)
        self.objective = objective or default_loss(config, num_members)
        self.processes = DataParallel.current()
        self.processes.share(model)
        self.members = range(config.first_member, config.first_member + num_members)
        own = config.order != "shared" and isinstance(data.train, Split)
        if own and num_members > 1 and not (isinstance(model, Ensemble) and model.is_expandable):
            own = False  # members that run in one pass have one order of the examples
        self._check(num_members, own)
        self.order = Order(
            config.batch_size,
            list(self.members) if own else None,
            config.bootstrap,
            config.augment,
            config.seed,
            split=config.order == "split",
            folds=config.folds or 0,
        )
        self.optimizer = Optimizer(model, config)
        self.selection = Selection(model, config.patience)
        self.average = WeightAverage(self.model, config.ema)
        self.history, self.place, self.stop, self.agreed = History(), Place(), Stop(), False
        self.scaler = torch.amp.GradScaler(config.device, enabled=config.precision == "float16")
        self.has_validation_targets = has_targets(data.val)
        self.chooses = config.select != "last" and has_examples(data.val)
        if checkpoint is not None:
            require_tensors(model.state_dict(), "a checkpoint is written")
        self.start = ""
        if checkpoint is not None or trajectory is not None:
            self.start = getattr(model, "made_from", None) or initial_weights(self.model, checkpoint)
        if trajectory is not None:
            if is_sharded(model):
                raise EnfoldError("trajectory must be None for sharded parameters, got a folder: use checkpoint=")
            trajectory.require(model, self.identity)

    def _check(self, num_members: int, own: bool) -> None:
        name = "bootstrap" if self.config.bootstrap else "folds"
        if (self.config.bootstrap and num_members > 1 and not own) or (
            self.config.folds and (self.config.order != "own" or not own)
        ):
            raise EnfoldError(
                f"{name} needs a separate order of the examples for each member, got one order for all members: set "
                "order='own', pass the training data as tensors or a Dataset, and train a DeepEnsemble"
            )
        if self.config.order == "split" and not own:
            raise EnfoldError(
                "order='split' needs training data in memory and members with inputs of their own, got a loader or one "
                "pass for all members: set order='shared', or pass the training data as tensors or a Dataset"
            )
        if self.config.patience is not None and not has_examples(self.data.val):
            raise EnfoldError(
                "patience needs validation examples, got "
                f"patience={self.config.patience} and no validation examples: pass val, or set patience=None"
            )

    def run(self, on_epoch: Callable[[Epoch], None] | None, title: str, quiet: bool, log: Log | None = None) -> History:
        """Train for the remaining epochs.

        Args:
            on_epoch: Function called with the record of every epoch.
            title: Title of the progress bar.
            quiet: Show no progress bar.
            log: Where settings and metrics are logged to.

        Returns:
            The history of the training.
        """
        stored, log = None, Log() if log is None else log
        if self.checkpoint is not None:
            identity = self.identity  # of the model before `on_fit_start` adds to it
            stored = read_checkpoint(self.checkpoint, identity) if self.checkpoint.exists() else None
        if isinstance(self.model, Ensemble):
            self.model.on_fit_start(self.data, self.config)
        if stored is not None:
            stored.warn_of_environment(self.model)
            self.history = stored.restore(self.model, self.optimizer, self.selection, self.scaler, self.average)
            self.place = stored.place
        steps = self.order.steps(self.data.train)
        total = None if steps is None else steps * self.config.epochs
        done = (steps or 0) * len(self.history.epochs) + len(self.place.sizes)
        if log:
            log.log_settings(self._describe(title))
        shown, stopping = (
            progress(title, total, done=done, quiet=quiet or not self.processes.is_first),
            nullcontext(Stop()),
        )
        with (
            stopping if self.checkpoint is None else stops_by_itself() as self.stop,
            shown as bar,
            _compile(self.model, self.config.compile),
        ):
            for record in self._epochs(bar, log):
                if on_epoch is not None:
                    on_epoch(dataclasses.replace(record, training=title))
        if self.chooses:
            self.selection.apply()
            self.history.chosen = list(self.selection.epoch)
        else:
            self.average.apply()
        if isinstance(self.model, Ensemble):
            self.model.on_fit_end(self.data)
        _record_task(self.model, self.task)
        self.model.eval()
        warn_if_similar(self.model, self.data)
        return self.history

    def _epochs(self, bar: ProgressBar, log: Log) -> Iterator[Epoch]:
        """Train for the remaining epochs, and log and yield the record of each."""
        done = len(self.history.epochs)
        if not done and self.place.generator is None:
            self._begin()
            if self.history.start is not None:
                log.log_metrics(self.history.metrics(self.history.start), 0)
        for epoch in range(done, self.config.epochs):
            if self.chooses and self.selection.is_finished(epoch):
                return
            record = self._epoch(epoch, bar)
            log.log_metrics(self.history.metrics(record), epoch + 1)
            yield record

    def _begin(self) -> None:
        self._store(0)
        if self.chooses:
            started = time.perf_counter()
            scores = self._scores()
            self.history.start = Epoch(-1, [], **scores, lr=0.0, seconds=time.perf_counter() - started)
            self.selection.update(0, self.history.start.selected_by)

    def _epoch(self, epoch: int, bar: ProgressBar) -> Epoch:
        started = time.perf_counter()
        self.model.train()
        self.optimizer.clear()  # gradients of a previous or failed training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.config.seed, "loader", epoch))  # for loaders that shuffle
            place = self._batches(epoch, bar, started)
        self.processes.synchronize(self.model)
        steps = len(place.sizes)
        bar.advance((self.order.steps(self.data.train) or steps) - steps)  # dropped batches
        with self.average.use_averages():
            record = self._record(epoch, _mean(place.losses, place.sizes), started - place.seconds, steps)
            self.history.epochs.append(record)
            if self.chooses:
                self.selection.update(epoch + 1, record.selected_by)
        if isinstance(self.model, Ensemble):
            self.model.on_epoch_end(epoch + 1, self.config)
        with self.average.use_averages():
            self._store(epoch + 1)
        if self.checkpoint is not None:
            self._save(self.checkpoint)
        bar.say(_summary(record, self.config.epochs, self.history))
        if self._stops:
            raise KeyboardInterrupt
        return record

    @property
    def _stops(self) -> bool:
        """Whether the training was asked to stop; several processes stop after the same batch."""
        return self.stop.is_requested if self.processes.size == 1 else self.agreed

    def _batches(self, epoch: int, bar: ProgressBar, started: float) -> Place:
        """Train on the batches of an epoch that are not done, and return their losses; stop between two if asked to."""
        place, self.place = self.place, Place()
        done, before = len(place.sizes), place.seconds
        for number, batch in enumerate(self.order.batches(self.data, epoch)):
            if number < done:
                if number == done - 1 and place.generator is not None:
                    torch.set_rng_state(place.generator)
                continue
            place.losses.append(self._step(batch.to(self.config.device), epoch, number))
            place.sizes.append(len(batch))
            bar.advance(1)
            if self._stops and self.checkpoint is not None:
                place.generator, place.seconds = torch.get_rng_state(), before + time.perf_counter() - started
                self._save(self.checkpoint, place)
                raise KeyboardInterrupt
        return place

    def _save(self, file: Path, place: Place | None = None) -> None:
        parts = (self.model, self.optimizer, self.selection, self.scaler, self.history)
        if self.processes.is_first or is_sharded(self.model):  # then all processes contribute
            target = file if self.processes.is_first else None
            save_checkpoint(target, *parts, self.identity, self.average, place)
        self.processes.wait()

    def _store(self, epoch: int) -> None:
        includes = self.trajectory is not None and self.trajectory.includes(epoch, self.config.epochs)
        if self.trajectory is not None and includes and self.processes.is_first:
            self.trajectory.store(self.model, epoch, self.identity)

    def _step(self, batch: Batch, epoch: int, number: int) -> torch.Tensor:
        batch, share = self.processes.part(batch)
        rank = (self.processes.rank,) if self.processes.rank else ()  # the first draws what a single process draws
        noise = [derive(self.config.seed, "noise", member, epoch, number, *rank) for member in self.members]
        context = StepContext(derive(self.config.seed, "moment", epoch, number), self._progress(epoch, number))
        try:
            with several_examples():
                losses = backward(
                    self.model,
                    batch,
                    self.objective,
                    autocast(self.config.precision, self.config.device),
                    self.scaler,
                    noise,
                    context,
                    self.processes.weight(self.model, share),
                )
        except Exception as error:
            if not number:
                refuse_shape(self.model, batch.inputs[0] if batch.own else batch.inputs, error)
            raise
        losses, self.agreed = self.processes.reduce(self.model, losses, share, stop=self.stop.is_requested)
        if not bool(torch.isfinite(losses).all()):
            member = int((~torch.isfinite(losses)).nonzero()[0])
            index = self.members[member] if len(losses) == len(self.members) else member
            saved = f"; '{self.checkpoint}' has the state after epoch {epoch}" if self.checkpoint and epoch else ""
            raise NonFiniteLoss(
                f"the loss must be finite, got {float(losses[member])} for member {index} in epoch "
                f"{epoch + 1}, batch {number + 1}: lower lr, or set clip_norm{saved}"
            )
        self.optimizer.step(self._rate_factor(epoch, number), self.scaler)
        self.average.update()
        if isinstance(self.model, Ensemble):
            before = sum(record.steps for record in self.history.epochs)
            self.model.on_step_end(before + number + 1, self.optimizer)
        return losses.float()

    def _progress(self, epoch: int, number: int) -> float:
        """Return the fraction of the training that is done."""
        steps = self.order.steps(self.data.train) or 0
        return (epoch + (number / steps if steps else 0.0)) / self.config.epochs

    def _rate_factor(self, epoch: int, number: int) -> float:
        steps = self.order.steps(self.data.train)
        if steps is None:  # a loader without a length: one rate per epoch
            return self.config.rate_factor(epoch, 1)
        return self.config.rate_factor(epoch * steps + number, steps)

    def _describe(self, title: str) -> dict[str, Any]:
        """Return the settings for loggers."""
        options: dict[str, Any] = {}
        with suppress(EnfoldError):  # a method of the user's own without its options as attributes
            options = self.model.options() if isinstance(self.model, Ensemble) else {}
        parts = {"train_examples": self.data.train, "val_examples": self.data.val}
        return {
            "title": title,
            "model": type(self.model).__name__,
            "num_members": trained_members(self.model),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": self.data.source,
            **{name: len(part) for name, part in parts.items() if isinstance(part, Split)},
            **{f"model/{name}": value for name, value in options.items()},
            **{each.name: getattr(self.config, each.name) for each in dataclasses.fields(self.config)},
        }

    def _scores(self) -> dict[str, Any]:
        """Return loss and score on validation examples, of each member and of the ensemble; empty without any.

        The loss is the criterion of the task, NLL for classes, and the score is the accuracy for classes.
        """
        if not has_examples(self.data.val):
            return {"validation_loss": [], "validation_score": [], "ensemble_loss": None}
        if not self.has_validation_targets:
            return self._divergences()
        validation = predict(self.evaluated_model(self.model), self.data.val, task=self.task)
        metrics = metrics_for(validation)
        loss, score = metrics[validation.criterion], metrics[validation.score]
        self.history.criterion, self.history.score = loss.name, score.name
        several = validation.num_members > 1
        calibrated: list[float | None] = []
        if self.config.select == "calibrated":
            calibrated = [calibrated_nll(validation.member(index)) for index in range(validation.num_members)]
        return {
            "validation_loss": per_member(loss, validation).tolist(),
            "validation_score": per_member(score, validation).tolist(),
            "ensemble_loss": loss(validation) if several else None,
            "ensemble_score": score(validation) if several else None,
            "calibrated_loss": [] if None in calibrated else calibrated,
        }

    def _divergences(self) -> dict[str, Any]:
        """Return the divergence of each member from its teacher on validation examples without targets."""
        if not isinstance(self.objective, HasDivergence):
            raise EnfoldError("val must have targets, got inputs only: pass targets, or val=None")
        found = self.objective.divergence(self.model, self.data.val)
        self.history.criterion = self.history.score = "divergence"
        return {"validation_loss": found, "validation_score": found, "ensemble_loss": None}

    def _record(self, epoch: int, train_loss: list[float], started: float, steps: int) -> Epoch:
        scores = self._scores()
        rate = self.optimizer.inner.param_groups[0]["lr"]
        figures = self.model.figures() if isinstance(self.model, HasFigures) else {}
        seconds = time.perf_counter() - started
        return Epoch(epoch, train_loss, **scores, lr=rate, seconds=seconds, steps=steps, figures=figures)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The properties that a checkpoint must match: data, initial weights, network, loss and settings."""
        return training_identity(self.model, self.data, self.objective, self.config, self.start)


def _record_task(model: nn.Module, task: Task) -> None:
    found = known_task(task)
    if found is not None:  # there was a batch
        set_model_task(model, found)


def _mean(losses: list[torch.Tensor], sizes: list[int]) -> list[float]:
    """Return each member's mean loss over the examples of an epoch, from batches of different sizes."""
    weights = torch.tensor(sizes, dtype=torch.float64)
    mean: list[float] = (weights @ torch.stack(losses).cpu().double() / weights.sum()).tolist()
    return mean


@contextmanager
def _compile(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile the network inside the block; members then run sequentially."""
    if not wanted:
        yield
        return
    members = model if isinstance(model, Ensemble) and model.is_expandable else None
    network = model if members is None else members.skeleton.network
    engine, before = None if members is None else members.engine, network._compiled_call_impl
    if members is not None:
        members.set_engine("loop")
    # network.compile() would leave networks of PyTorch classes, such as nn.Sequential, uncompiled.
    network._compiled_call_impl = torch.compile(lambda *args, **kwargs: network._call_impl(*args, **kwargs))
    try:
        yield
    finally:
        network._compiled_call_impl = before
        if members is not None and engine is not None:
            members.set_engine(engine)


def _summary(record: Epoch, epochs: int, history: History) -> str:
    text = f"epoch {record.epoch + 1}/{epochs}  loss {sum(record.train_loss) / len(record.train_loss):.4f}"
    criterion = history.criterion.upper()
    if record.validation_loss:
        mean_loss = sum(record.validation_loss) / len(record.validation_loss)
        mean_score = sum(record.validation_score) / len(record.validation_score)
        shown = f"{100 * mean_score:.2f} %" if history.score == "accuracy" else f"{mean_score:.4f}"
        text += f"  validation {criterion} {mean_loss:.4f}"
        text += f"  {history.score} {shown}" if history.score != history.criterion else ""
    if record.ensemble_loss is not None:
        text += f"  ensemble {criterion} {record.ensemble_loss:.4f}"
    return text + "".join(f"  {name} {value:.3g}" for name, value in record.figures.items())
