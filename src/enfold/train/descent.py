"""A descent along slopes of the caller's own: optimizer, chosen epoch, checkpoint and progress are those of `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from enfold.io.identity import Identity
from enfold.progress import ProgressBar, Silent, progress
from enfold.train.checkpoint import read_checkpoint, save_checkpoint
from enfold.train.config import TrainConfig
from enfold.train.history import Epoch, History
from enfold.train.optimize import Optimizer
from enfold.train.selection import Selection


class Descent:
    """Parameters on their way down by a plan; of an earlier run that was stopped, it goes on to the same bits."""

    def __init__(
        self, parameters: nn.ParameterList, plan: TrainConfig, identity: Identity, checkpoint: Path | None
    ) -> None:
        self.parameters, self.plan, self.identity, self.checkpoint = parameters, plan, identity, checkpoint
        self.optimizer, self.scaler = Optimizer(parameters, plan), torch.amp.GradScaler(enabled=False)
        self.selection, self.history = Selection(parameters, plan.patience), History()
        self.bar: ProgressBar = Silent()
        self.steps = 0  # of this epoch
        if checkpoint is not None and checkpoint.exists():
            stored = read_checkpoint(checkpoint, identity)
            self.history = stored.restore(parameters, self.optimizer, self.selection, self.scaler)

    def epochs(self, loss: Callable[[], float], steps: int | None, title: str, of: str = "") -> Iterator[int]:
        """The epochs that are still to do, in each of which the caller makes its `steps`.

        After each one `loss` is asked; in the end the parameters are those of the lowest, the start's among them.
        """
        done = len(self.history.epochs)
        if not done:
            self.selection.update(0, [loss()])
        total = None if steps is None else steps * self.plan.epochs
        with progress(title, total, done=(steps or 0) * done) as self.bar:
            for epoch in range(done, self.plan.epochs):
                if self.selection.finished(epoch):
                    self.bar.advance((steps or 0) * (self.plan.epochs - epoch))
                    self.bar.say(
                        f"{of}no lower loss than {self.selection.nll[0]:.4f} since epoch {self.selection.epoch[0]}"
                    )
                    break
                started, self.steps = time.perf_counter(), 0
                yield epoch
                self._keep(epoch, loss(), started)
                lowest = self.selection.nll[0]
                now = self.history.epochs[-1].train_loss[0]
                self.bar.say(f"{of}epoch {epoch + 1}/{self.plan.epochs}  loss {now:.4f}  lowest {lowest:.4f}")
        self.selection.apply()

    def step(self, slopes: Sequence[Tensor]) -> None:
        """One step down."""
        for parameter, slope in zip(self.parameters, slopes, strict=True):
            parameter.grad = slope
        self.optimizer.step(1.0, self.scaler)
        self.steps += 1
        self.bar.advance(1)

    def _keep(self, epoch: int, loss: float, started: float) -> None:
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
