"""What a model may do beside its training: average, take snapshots, pull members together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enfold.data import Data
    from enfold.train.config import TrainConfig
    from enfold.train.optimize import Optimizer


class Follower:
    """A model that follows its own training; whatever it gathers must be in its state dict, so that training resumes.

    `fit` calls these and nothing else; a method that needs more has its own `train`.
    """

    def meet(self, data: Data, plan: TrainConfig) -> None:
        """Before anything else, also when a training goes on: what it will learn from, and how."""

    def begin(self) -> None:
        """Before the first epoch: what another training left is forgotten."""

    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """After step `step` of the whole training, counted from 1."""

    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """After epoch `epoch`, counted from 1, before the checkpoint is written."""

    def finish(self, data: Data) -> None:
        """Once, after the last epoch."""
