"""Routes: ways from an ensemble to what is shipped in place of it.

    merges          no training: averages and soups within one basin, matched averages between basins
    distillations   a member, a merge or another network learns the ensemble's predictions
    ensembles       for budgets above one pass: fewer members, or an efficient ensemble

All distillations match functions: the target is the mean prediction of the members at temperature 1, for exactly the
augmented or mixed inputs that the student gets (L. Beyer et al., 2022, arXiv:2106.05237).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.compress.diagnosis import Diagnosis
from enfold.compress.members import Student
from enfold.data import Data, Split
from enfold.distill import distill
from enfold.distill.loss import DistillationLoss
from enfold.distill.losses.kd import KD
from enfold.distill.out_of_fold import OutOfFoldTeacher
from enfold.distill.perturbation import Perturbation
from enfold.engines.copying import copy_network
from enfold.ensemble import Ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.loggers import Log, LoggerLike
from enfold.tasks import Task
from enfold.train import TrainConfig
from enfold.train.history import Epoch

Kind = Literal["merge", "distillation", "ensemble"]
RECENT = 0.05  # part of the steps over which weights are averaged
LONGEST_AVERAGE = 0.9999  # decay of the average of weights


@dataclass(frozen=True)
class Setting:
    """The inputs of all routes.

    Args:
        members: The ensemble.
        data: Training and validation examples.
        task: What the outputs mean.
        config: Settings of training.
        diagnosis: What is known of the members.
        students: Networks of other architectures to distil into; empty for the members' own.
        base: The network that the members were fine-tuned from; None if there is none.
        folds: Which member was trained on which example, as `OutOfFoldTeacher` takes it; None if all saw all.
        budget: Largest cost of a prediction relative to one member.
        memory: Largest size relative to one member.
    """

    members: Ensemble
    data: Data
    task: Task
    config: TrainConfig
    diagnosis: Diagnosis
    students: tuple[Student, ...] = ()
    base: nn.Module | None = None
    folds: Tensor | None = None
    budget: float = 1.0
    memory: float = float("inf")

    def best_member(self) -> nn.Module:
        """Return a copy of the best member."""
        return copy_network(self.members.member(self.diagnosis.best_member))

    @property
    def has_networks(self) -> bool:
        """Return whether members exist as networks."""
        return self.members.is_expandable or self.is_mixed

    @property
    def is_mixed(self) -> bool:
        """Return whether members have different architectures."""
        return isinstance(self.members, MixedEnsemble)

    def settings(self, epochs: int) -> TrainConfig:
        """Return the settings of a training of this length."""
        warmup = min(self.config.warmup_epochs, epochs)
        return self.config.replace(epochs=epochs, warmup_epochs=warmup, task=self.task)


@dataclass(frozen=True)
class Route:
    """One way to a network or an efficient ensemble.

    Args:
        name: Its name in tables.
        idea: What it does, in a few words.
        kind: "merge", "distillation" or "ensemble".
        make: Function that returns the result of a route without training.
        loss: The loss of a distillation.
        perturb: The perturbation of a distillation.
        init: The network that a distillation starts from; None for the best member.
        student: Function that makes a student of another architecture, or an ensemble.
        blank: Function that makes an untrained model into which a stored result is loaded; None for a copy of the best
            member.
        is_out_of_fold: Whether each example is answered by the members that were not trained on it.
        is_averaged: Whether the result is a moving average of the weights.
        effort: Duration of an epoch relative to that of a plain distillation.
    """

    name: str
    idea: str
    kind: Kind = "distillation"
    make: Callable[[], nn.Module] | None = None
    loss: DistillationLoss = field(default_factory=KD)
    perturb: Perturbation | None = None
    init: nn.Module | None = None
    student: Callable[[], nn.Module] | None = None
    blank: Callable[[], nn.Module] | None = None
    is_out_of_fold: bool = False
    is_averaged: bool = False
    effort: float = 1.0

    @property
    def is_trained(self) -> bool:
        """Return whether the route trains a network."""
        return self.make is None

    def run(
        self,
        setting: Setting,
        epochs: int,
        *,
        on_epoch: Callable[[Epoch], None] | None = None,
        logger: LoggerLike | Log = None,
        checkpoint: Path | None = None,
        quiet: bool = False,
    ) -> nn.Module:
        """Return the result of this route.

        Args:
            setting: The members and the data.
            epochs: Epochs of training.
            on_epoch: Function called with the record of every epoch.
            logger: Where settings and metrics are logged to.
            checkpoint: File to continue from.
            quiet: Show no progress bar.
        """
        if self.make is not None:
            return self.make()
        teacher: Any = setting.members
        if self.is_out_of_fold and setting.folds is not None:
            teacher = OutOfFoldTeacher(setting.members, setting.folds)
        config = setting.settings(epochs)
        if config.select == "best":  # of the teachers' confidence every epoch is right, by what they know the last ones
            config = config.replace(select="calibrated")
        if self.is_averaged:
            config = config.replace(ema=average_decay(setting, epochs))
        return distill(
            teacher,
            setting.data,
            loss=self.loss,
            perturb=self.perturb,
            config=config,
            checkpoint=checkpoint,
            on_epoch=on_epoch,
            logger=logger,
            title=self.name,
            quiet=quiet,
            **self._start(setting),
        )

    def _start(self, setting: Setting) -> dict[str, Any]:
        """Return the arguments of `distill` that say what is trained."""
        if self.student is None:
            return {"init": setting.best_member() if self.init is None else self.init}
        made = self.student()
        return {"student": made if isinstance(made, Ensemble) else self.student}

    def blank_model(self, setting: Setting) -> nn.Module:
        """Return a model of the structure of the result."""
        make = self.blank or self.student or setting.best_member
        with torch.random.fork_rng(devices=[]):
            return make()


def average_decay(setting: Setting, epochs: int) -> float | None:
    """Return the decay of an average of the weights over the last steps; None if the number of steps is unknown."""
    train = setting.data.train
    if not isinstance(train, Sized):
        return None
    steps = epochs * (-(-len(train) // setting.config.batch_size) if isinstance(train, Split) else len(train))
    decay = 1 - 1 / max(1.0, RECENT * steps)
    return min(LONGEST_AVERAGE, decay)


def keep(routes: Sequence[Route], number: int) -> list[Route]:
    """Return the routes that enter the next round: the best of each perturbation first, as perturbations help later.

    Args:
        routes: The routes, best first.
        number: How many are kept.
    """
    kinds = [None if route.is_out_of_fold else type(route.perturb) for route in routes]
    is_first = [kind not in kinds[:index] for index, kind in enumerate(kinds)]
    order = sorted(range(len(routes)), key=lambda index: not is_first[index])
    return [routes[index] for index in order[:number]]
