"""fit: the one training loop, for single networks, ensembles and students."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.content import content
from enfold.data.convert import Examples, as_data, require
from enfold.data.dataset import Split, has_examples
from enfold.engines.inputs import refuse_shape
from enfold.engines.modes import refuse_inference_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, NonFiniteLoss
from enfold.evaluate import predict
from enfold.io.checkpoints import require_tensors
from enfold.io.files import digest
from enfold.io.identity import plain
from enfold.metrics import accuracy, nll, per_member
from enfold.progress import ProgressBar, progress
from enfold.seeds import derive
from enfold.train.backward import backward
from enfold.train.batch_norm import several_examples
from enfold.train.checkpoint import read_checkpoint, save_checkpoint
from enfold.train.config import TrainConfig
from enfold.train.diversity import warn_if_alike
from enfold.train.history import Epoch, History, Telling
from enfold.train.objective import CrossEntropy, Objective, StepContext
from enfold.train.optimize import Optimizer, trained_members
from enfold.train.selection import Selection
from enfold.train.trajectory import Trajectory

ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # in the text of an object, another one in each process


def fit(
    model: nn.Module,
    train: Examples,
    val: Examples | None = None,
    config: TrainConfig | None = None,
    *,
    objective: Objective | None = None,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    title: str = "training",
    quiet: bool = False,
    judged: Callable[[nn.Module], nn.Module] | None = None,
    keep: Trajectory | str | Path | None = None,
    **settings: Any,
) -> History:
    """Train a network or an ensemble in place.

    ``fit(model, train, val, epochs=20, lr=1e-3)`` is short for ``fit(model, train, val, TrainConfig(epochs=20,
    lr=1e-3))``.

    Args:
        model: A network, or an `Ensemble`, whose members are trained together.
        train: Training examples: a DataLoader, a Dataset, a pair (inputs, labels) of tensors or arrays, or a data set
            of `enfold.data.load`, whose validation split is then used, too.
        val: Validation examples, of the same kinds; they choose the best epoch and are reported after every epoch.
        config: All settings of the training; the default is `TrainConfig()`.
        objective: What is minimised; the default is cross-entropy with the label smoothing of `config`.
        checkpoint: A file that is written after every epoch. If it exists, training continues from it to the same
            bits; other data, initial weights or settings are refused.
        on_epoch: Called with the record of every epoch.
        title: The name on the progress bar.
        quiet: Show no progress bar.
        judged: A function that maps the model to what is evaluated on validation data in its place.
        keep: A folder for the networks after every epoch, or a `Trajectory` that says which epochs.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Returns:
        The history of the training: losses, validation scores and times of every epoch.

    Raises:
        EnfoldError: If an argument is of the wrong kind; nothing is changed then.
        NonFiniteLoss: If a loss becomes NaN or infinite.
    """
    refuse_inference_mode("training")
    require(train, "train", "fit")
    plan = (config or TrainConfig()).update(settings)
    data = as_data(train, val, batch_size=plan.batch_size)
    file = Path(checkpoint) if checkpoint else None
    if isinstance(model, Ensemble):
        plan = model.configure(plan)
        if objective is None:
            history = model.fit_members(data, plan, checkpoint=file, title=title, quiet=quiet)
            if history is not None:
                return history
            objective = model.objective(plan)
    kept = Trajectory(keep) if isinstance(keep, str | Path) else keep
    with torch.enable_grad():
        training = Fit(model, data, plan, objective, file, judged, kept)
        try:
            return training.run(on_epoch, title, quiet)
        finally:
            if file is not None and model in _begun:
                _begun[model].end = _weights(model)


class Fit:
    """One training: what it needs through all epochs."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        plan: TrainConfig,
        objective: Objective | None,
        checkpoint: Path | None,
        judged: Callable[[nn.Module], nn.Module] | None = None,
        keep: Trajectory | None = None,
    ) -> None:
        self.judged, self.trajectory = judged or (lambda model: model), keep
        self.model, self.data, self.plan, self.checkpoint = model.to(plan.device), data, plan, checkpoint
        num_members = trained_members(model)
        self.objective = objective or _default_objective(plan, num_members)
        self.members = range(plan.first_member, plan.first_member + num_members)
        own = plan.order != "shared" and isinstance(data.train, Split)
        if own and num_members > 1 and not (isinstance(model, Ensemble) and model.is_expandable):
            own = False  # members that run in one pass see the data in one order
        self._check(num_members, own)
        self.order = Order(
            plan.batch_size,
            list(self.members) if own else None,
            plan.bootstrap,
            plan.augment,
            plan.seed,
            split=plan.order == "split",
        )
        self.optimizer = Optimizer(model, plan)
        self.selection = Selection(model, plan.patience)
        self.history = History()
        self.scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "float16")
        self.chooses = plan.select == "best" and has_examples(data.val)
        if checkpoint is not None:
            require_tensors(model.state_dict(), "a checkpoint is written")
        self.start = ""
        if checkpoint is not None or keep is not None:
            self.start = getattr(model, "made_from", None) or _initial_weights(self.model, checkpoint)
        if keep is not None:
            keep.require(model, self.identity)

    def _check(self, num_members: int, own: bool) -> None:
        if self.plan.bootstrap and num_members > 1 and not own:
            raise EnfoldError(
                "bootstrap needs a separate order of the examples for each member, got one order for all members: set "
                "order='own', pass the training data as tensors or a Dataset, and train a DeepEnsemble"
            )
        if self.plan.order == "split" and not own:
            raise EnfoldError(
                "order='split' needs training data in memory and members with inputs of their own, got a loader or one "
                "pass for all members: set order='shared', or pass the training data as tensors or a Dataset"
            )
        if self.plan.patience is not None and not has_examples(self.data.val):
            raise EnfoldError(
                "patience needs validation examples, got "
                f"patience={self.plan.patience} and no validation examples: pass val, or set patience=None"
            )

    def run(self, on_epoch: Callable[[Epoch], None] | None, title: str, quiet: bool) -> History:
        """Train for all epochs that remain."""
        stored = None
        if self.checkpoint is not None and self.checkpoint.exists():
            stored = read_checkpoint(self.checkpoint, self.identity)
        if isinstance(self.model, Ensemble):
            self.model.on_fit_start(self.data, self.plan)
        if stored is not None:
            self.history = stored.restore(self.model, self.optimizer, self.selection, self.scaler)
        steps = self.order.steps(self.data.train)
        total = None if steps is None else steps * self.plan.epochs
        done = len(self.history.epochs)
        shown = progress(title, total, done=(steps or 0) * done, quiet=quiet)
        with shown as bar, _compiled(self.model, self.plan.compile):
            if not done:
                self._begin()
            for epoch in range(done, self.plan.epochs):
                if self.chooses and self.selection.finished(epoch):
                    break
                record = self._epoch(epoch, bar)
                if on_epoch is not None:
                    on_epoch(record)
        if self.chooses:
            self.selection.apply()
            self.history.chosen = list(self.selection.epoch)
        if isinstance(self.model, Ensemble):
            self.model.on_fit_end(self.data)
        self.model.eval()
        warn_if_alike(self.model, self.data)
        return self.history

    def _begin(self) -> None:
        self._keep(0)
        if self.chooses:
            started = time.perf_counter()
            self.history.start = Epoch(-1, [], *self._scores(), 0.0, time.perf_counter() - started)
            self.selection.update(0, self.history.start.validation_nll)

    def _epoch(self, epoch: int, bar: ProgressBar) -> Epoch:
        started = time.perf_counter()
        losses: list[torch.Tensor] = []
        sizes: list[int] = []
        self.model.train()
        self.optimizer.clear()  # of what another training, or one that failed, left behind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.plan.seed, "loader", epoch))  # what a loader of the user's own shuffles by
            for number, batch in enumerate(self.order.batches(self.data, epoch)):
                losses.append(self._step(batch.to(self.plan.device), epoch, number))
                sizes.append(batch.labels.shape[-1])
                bar.advance(1)
        bar.advance((self.order.steps(self.data.train) or len(sizes)) - len(sizes))  # what was left out
        record = self._record(epoch, _mean(losses, sizes), started, len(sizes))
        self.history.epochs.append(record)
        if self.chooses:
            self.selection.update(epoch + 1, record.validation_nll)
        if isinstance(self.model, Ensemble):
            self.model.on_epoch_end(epoch + 1, self.plan)
        self._keep(epoch + 1)
        if self.checkpoint is not None:
            save_checkpoint(
                self.checkpoint,
                self.model,
                self.optimizer,
                self.selection,
                self.scaler,
                self.history,
                self.identity,
            )
        bar.say(_summary(record, self.plan.epochs))
        return record

    def _keep(self, epoch: int) -> None:
        if self.trajectory is not None and self.trajectory.is_kept(epoch, self.plan.epochs):
            self.trajectory.keep(self.model, epoch, self.identity)

    def _step(self, batch: Batch, epoch: int, number: int) -> torch.Tensor:
        noise = [derive(self.plan.seed, "noise", member, epoch, number) for member in self.members]
        moment = StepContext(derive(self.plan.seed, "moment", epoch, number), self._progress(epoch, number))
        try:
            with several_examples():
                losses = backward(self.model, batch, self.objective, _precision(self.plan), self.scaler, noise, moment)
        except Exception as error:
            if not number:
                refuse_shape(self.model, batch.inputs[0] if batch.own else batch.inputs, error)
            raise
        if not bool(torch.isfinite(losses).all()):
            member = int((~torch.isfinite(losses)).nonzero()[0])
            kept = f"the state after epoch {epoch} is kept in '{self.checkpoint}'" if self.checkpoint and epoch else ""
            raise NonFiniteLoss(
                f"the loss must stay finite, but it is {float(losses[member])} for member {member} in epoch "
                f"{epoch + 1}, batch {number + 1}: lower the learning rate, or set clip_norm"
                + (f"; {kept}" if kept else "")
            )
        self.optimizer.step(self._rate_factor(epoch, number), self.scaler)
        if isinstance(self.model, Ensemble):
            before = sum(record.steps for record in self.history.epochs)
            self.model.on_step_end(before + number + 1, self.optimizer)
        return losses.float()

    def _progress(self, epoch: int, number: int) -> float:
        """The part of the training that is done."""
        steps = self.order.steps(self.data.train) or 0
        return (epoch + (number / steps if steps else 0.0)) / self.plan.epochs

    def _rate_factor(self, epoch: int, number: int) -> float:
        steps = self.order.steps(self.data.train)
        if steps is None:  # a loader without a length: one rate for each epoch
            return self.plan.rate_factor(epoch, 1)
        return self.plan.rate_factor(epoch * steps + number, steps)

    def _scores(self) -> tuple[list[float], list[float], float | None]:
        """On validation data, where there are some: NLL and accuracy of each member, and the NLL of their mean."""
        if not has_examples(self.data.val):
            return [], [], None
        validation = predict(self.judged(self.model), self.data.val)
        ensemble = nll(validation) if validation.num_members > 1 else None
        return per_member(nll, validation).tolist(), per_member(accuracy, validation).tolist(), ensemble

    def _record(self, epoch: int, train_loss: list[float], started: float, steps: int) -> Epoch:
        scores = self._scores()
        rate = self.optimizer.inner.param_groups[0]["lr"]
        told = self.model.figures() if isinstance(self.model, Telling) else {}
        return Epoch(epoch, train_loss, *scores, rate, time.perf_counter() - started, steps, told)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued: data, initial weights, network, loss and plan."""
        shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(self.model)}
        ensemble = self.model if isinstance(self.model, Ensemble) else None
        network = ensemble.skeleton.network if ensemble is not None and ensemble.is_expandable else self.model
        method = "" if ensemble is None else f"{type(ensemble).__name__}{ensemble.options()}"
        return plain(
            {
                **content(self.data, ("train", "val")),
                "initial weights": self.start,
                "network": digest([], f"{shapes}{network!r}"),
                "method": digest([], method),
                "loss": digest([], ADDRESS.sub("", f"{self.objective!r} {_settings(self.objective)}")),
                "plan": asdict(self.plan),
            }
        )


@dataclass
class _Begun:
    """A training of this process that may be continued with the same object, which is half trained then."""

    checkpoint: Path | None
    start: str  # a digest of the weights at its start
    end: str = ""  # and when it was left


_begun: WeakKeyDictionary[nn.Module, _Begun] = WeakKeyDictionary()


def _initial_weights(model: nn.Module, checkpoint: Path | None) -> str:
    """Return a digest of the weights that training began with, also for a model whose training was interrupted."""
    now, known = _weights(model), _begun.get(model)
    if known is None or known.checkpoint != checkpoint or now not in (known.start, known.end):
        known = _begun[model] = _Begun(checkpoint, now)
    return known.start


def _weights(model: nn.Module) -> str:
    return digest(tensor for _, tensor in _tensors(model))


def _settings(objective: object) -> str:
    """Return what the text of a loss may not show: its attributes, or the code of a function."""
    code = getattr(objective, "__code__", None)
    return repr(getattr(objective, "__dict__", {})) if code is None else f"{code.co_code!r}{code.co_consts!r}"


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]


def _default_objective(plan: TrainConfig, num_members: int) -> CrossEntropy:
    if isinstance(plan.label_smoothing, tuple):
        return CrossEntropy(plan.per_member("label_smoothing", num_members))
    return CrossEntropy(plan.label_smoothing)


def _mean(losses: list[torch.Tensor], sizes: list[int]) -> list[float]:
    """Each member's mean over the examples of an epoch, from its means over batches, of which the last is smaller."""
    weights = torch.tensor(sizes, dtype=torch.float64)
    mean: list[float] = (weights @ torch.stack(losses).cpu().double() / weights.sum()).tolist()
    return mean


def _precision(plan: TrainConfig) -> torch.autocast | nullcontext[None]:
    if plan.precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(plan.device).type, dtype=getattr(torch, plan.precision))


@contextmanager
def _compiled(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile the code of the network inside the block; members then run it one after the other."""
    if not wanted:
        yield
        return
    members = model if isinstance(model, Ensemble) and model.is_expandable else None
    network = model if members is None else members.skeleton.network
    engine, before = None if members is None else members.engine, network._compiled_call_impl
    if members is not None:
        members.set_engine("loop")
    # Not network.compile(): that leaves a network of one of torch's own classes, such as nn.Sequential, uncompiled.
    network._compiled_call_impl = torch.compile(lambda *args, **kwargs: network._call_impl(*args, **kwargs))
    try:
        yield
    finally:
        network._compiled_call_impl = before
        if members is not None and engine is not None:
            members.set_engine(engine)


def _summary(record: Epoch, epochs: int) -> str:
    text = f"epoch {record.epoch + 1}/{epochs}  loss {sum(record.train_loss) / len(record.train_loss):.4f}"
    if record.validation_nll:
        mean = sum(record.validation_nll) / len(record.validation_nll)
        best = sum(record.validation_accuracy) / len(record.validation_accuracy)
        text += f"  validation NLL {mean:.4f}  accuracy {100 * best:.2f} %"
    if record.ensemble_nll is not None:
        text += f"  ensemble NLL {record.ensemble_nll:.4f}"
    return text + "".join(f"  {name} {value:.3g}" for name, value in record.figures.items())
