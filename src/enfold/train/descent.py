"""Gradient descent with gradients from the caller, and the optimizer, selection and checkpoints of `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.io.identity import Identity
from enfold.loggers import Log
from enfold.progress import ProgressBar, Silent, progress
from enfold.train.checkpoint import read_checkpoint, save_checkpoint
from enfold.train.config import TrainConfig
from enfold.train.history import Epoch, History
from enfold.train.optimize import Optimizer
from enfold.train.selection import Selection


class Descent:
    """Parameters optimised according to a `TrainConfig`; an interrupted run resumes to the same bits."""

    def __init__(
        self,
        parameters: nn.ParameterList,
        config: TrainConfig,
        identity: Identity,
        checkpoint: Path | None,
        on_epoch: Callable[[Epoch], None] | None = None,
        log: Log | None = None,
    ) -> None:
        self.parameters, self.config, self.identity, self.checkpoint = parameters, config, identity, checkpoint
        if config.ema is not None:
            raise EnfoldError(f"ema must be None for a merge, got {config.ema}: leave ema out")
        self.optimizer, self.scaler = Optimizer(parameters, config), torch.amp.GradScaler(enabled=False)
        self.selection, self.history = Selection(parameters, config.patience), History()
        self.on_epoch, self.log = on_epoch, Log() if log is None else log
        self.bar: ProgressBar = Silent()
        self.steps = 0  # of this epoch
        if checkpoint is not None and checkpoint.exists():
            stored = read_checkpoint(checkpoint, identity)
            self.history = stored.restore(parameters, self.optimizer, self.selection, self.scaler)

    def epochs(self, loss: Callable[[], float], steps: int | None, title: str, of: str = "") -> Iterator[int]:
        """Yield the remaining epochs; the caller makes its `steps` in each.

        `loss` is evaluated after every epoch; finally the parameters with the lowest value, which may be the initial
        ones, are restored.

        Args:
            loss: Function that returns the loss after an epoch.
            steps: Steps per epoch; None if unknown.
            title: Title of the progress bar.
            of: What the loss is of, for messages.
        """
        done = len(self.history.epochs)
        if not done:
            self.selection.update(0, [loss()])
        total = None if steps is None else steps * self.config.epochs
        with progress(title, total, done=(steps or 0) * done) as self.bar:
            for epoch in range(done, self.config.epochs):
                if self.selection.is_finished(epoch):
                    self.bar.advance((steps or 0) * (self.config.epochs - epoch))
                    self.bar.say(
                        f"{of}loss not below {self.selection.best[0]:.4f} since epoch {self.selection.epoch[0]}"
                    )
                    break
                started, self.steps = time.perf_counter(), 0
                yield epoch
                self._record(epoch, loss(), started)
                lowest = self.selection.best[0]
                self._report(title)
                now = self.history.epochs[-1].train_loss[0]
                self.bar.say(f"{of}epoch {epoch + 1}/{self.config.epochs}  loss {now:.4f}  lowest {lowest:.4f}")
        self.selection.apply()

    def step(self, slopes: Sequence[Tensor]) -> None:
        """Take one optimizer step along the given gradients."""
        for parameter, slope in zip(self.parameters, slopes, strict=True):
            parameter.grad = slope
        self.optimizer.step(1.0, self.scaler)
        self.steps += 1
        self.bar.advance(1)

    def _report(self, title: str) -> None:
        record = self.history.epochs[-1]
        self.log.log_metrics(self.history.metrics(record), record.epoch + 1)
        if self.on_epoch is not None:
            self.on_epoch(replace(record, training=title))

    def _record(self, epoch: int, loss: float, started: float) -> None:
        rate = self.optimizer.inner.param_groups[0]["lr"]
        seconds = time.perf_counter() - started
        self.history.epochs.append(Epoch(epoch, [loss], [], [], None, rate, seconds, self.steps))
        self.selection.update(epoch + 1, [loss])
        if self.checkpoint is not None:
            save_checkpoint(
                self.checkpoint,
                self.parameters,
                self.optimizer,
                self.selection,
                self.scaler,
                self.history,
                self.identity,
            )
