"""Routes: ways from an ensemble to one network, cheap ones first.

    merges          no training: averages and soups within one basin, matched averages between basins
    distillations   a member, or the best merge, learns the ensemble's predictions on the views that it is shown

All distillations match functions: the target is the mean prediction of the members at temperature 1, for exactly the
augmented or mixed inputs that the student gets (L. Beyer et al., 2022, arXiv:2106.05237).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold.compress.diagnosis import Diagnosis
from enfold.data import Data
from enfold.data.convert import first_inputs
from enfold.data.dataset import Split
from enfold.data.tree import tensors
from enfold.distill import distill
from enfold.distill.losses.kd import KD
from enfold.distill.perturb.mixup import Mixup
from enfold.distill.perturbation import Perturbation
from enfold.ensemble import Ensemble
from enfold.loggers import Log, LoggerLike
from enfold.merge.average import average
from enfold.merge.fisher import fisher
from enfold.merge.model_stock import model_stock
from enfold.merge.regmean import regmean
from enfold.merge.slerp import slerp
from enfold.merge.soup import soup
from enfold.merge.task_arithmetic import task_arithmetic
from enfold.merge.ties import ties
from enfold.merge.weight_matching import weight_matching
from enfold.merge.wise_ft import wise_ft
from enfold.tasks import Task
from enfold.train import TrainConfig
from enfold.train.history import Epoch

LABELS = 0.5  # weight of the labels in the routes that learn from both


@dataclass(frozen=True)
class Setting:
    """What all routes start from.

    Args:
        members: The ensemble.
        data: Training and validation examples.
        task: What the outputs mean.
        config: Settings of training.
        diagnosis: What is known of the members.
        student: A function that makes a student of another architecture; None for the members' own.
        base: The network that the members were fine-tuned from; None if there is none.
    """

    members: Ensemble
    data: Data
    task: Task
    config: TrainConfig
    diagnosis: Diagnosis
    student: Callable[[], nn.Module] | None = None
    base: nn.Module | None = None


@dataclass(frozen=True)
class Route:
    """One way to a single network.

    Args:
        name: Its name in tables.
        idea: What it does, in a few words.
        make: Function that returns the network of a route without training.
        loss: The loss of a distillation.
        perturb: The perturbation of a distillation.
        init: The network that a distillation starts from; None for the best member.
    """

    name: str
    idea: str
    make: Callable[[], nn.Module] | None = None
    loss: KD | None = None
    perturb: Perturbation | None = None
    init: nn.Module | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the route trains a network."""
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
        """Return the network of this route.

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
        start: dict[str, Any] = {"student": setting.student} if setting.student else {"init": self._start(setting)}
        warmup = min(setting.config.warmup_epochs, epochs)
        return distill(
            setting.members,
            setting.data,
            loss=self.loss,
            perturb=self.perturb,
            config=setting.config.replace(epochs=epochs, warmup_epochs=warmup, task=setting.task),
            checkpoint=checkpoint,
            on_epoch=on_epoch,
            logger=logger,
            title=self.name,
            quiet=quiet,
            **start,
        )

    def _start(self, setting: Setting) -> nn.Module | None:
        if self.init is not None or not setting.members.is_expandable:
            return self.init
        return setting.members.member(setting.diagnosis.best_member)


def find_merges(setting: Setting) -> Iterator[Route]:
    """Yield the routes without training that can reach the members' quality."""
    members, data = setting.members, setting.data
    if not members.is_expandable or setting.student is not None:
        return
    if setting.base is not None:
        yield from _merges_with_base(setting, setting.base)
    if setting.diagnosis.is_one_basin:
        task = setting.task
        yield Route("average", "the mean of the members' weights", lambda: average(members, data))
        if task.is_categorical:
            score: Any = setting.diagnosis.criterion
            yield Route("greedy soup", "members that help, averaged", lambda: soup(members, data, data, score=score))
            yield Route(
                "learned soup", "learned weights of the members", lambda: soup(members, data, data, kind="learned")
            )
        yield Route("fisher", "a mean weighted by the Fisher information", lambda: fisher(members, data, task=task))
        yield Route("regmean", "layers that fit the members' activations", lambda: regmean(members, data))
        yield Route("slerp", "the mean on a sphere", lambda: slerp(members, data))
        return
    yield Route(
        "weight matching",
        "units matched between members, averaged, statistics repaired",
        lambda: weight_matching(members, data, repair="repair"),
    )


def _merges_with_base(setting: Setting, base: nn.Module) -> Iterator[Route]:
    """Yield the merges of members that were fine-tuned from one network."""
    members, data = setting.members, setting.data
    yield Route("wise-ft", "a line from the base to the mean", lambda: wise_ft(members, data, data, base=base))
    yield Route("model stock", "layers between base and mean", lambda: model_stock(members, data, base=base))
    yield Route("task arithmetic", "the sum of the changes", lambda: task_arithmetic(members, data, base=base))
    yield Route("ties", "changes of one sign", lambda: ties(members, data, base=base))


def find_distillations(setting: Setting, merged: nn.Module | None = None) -> Iterator[Route]:
    """Yield the distillations, most promising first.

    Args:
        setting: The members and the data.
        merged: A merge to start from as well, if there is a good one.
    """
    plain = KD()
    yield Route("distill", "learn the ensemble's predictions", loss=plain)
    if has_real_inputs(setting.data):
        yield Route("distill + mixup", "the same on mixtures of pairs of inputs", loss=plain, perturb=Mixup())
    yield Route("distill + labels", "predictions and labels, half each", loss=KD(alpha=1 - LABELS))
    if has_real_inputs(setting.data) and setting.task.is_categorical:
        both = KD(alpha=1 - LABELS)
        yield Route("distill + mixup + labels", "mixtures, predictions and labels", loss=both, perturb=Mixup())
    if merged is not None:
        yield Route("merge, then distill", "learn the predictions from the best merge on", loss=plain, init=merged)


def has_real_inputs(data: Data) -> bool:
    """Return whether inputs are one tensor of floating-point numbers or pixels, so that they can be mixed."""
    if isinstance(data.train, Split):
        return data.train.inputs.is_floating_point() or data.train.inputs.dtype == torch.uint8
    inputs = first_inputs(data.train)
    return isinstance(inputs, torch.Tensor) and all(each.is_floating_point() for each in tensors(inputs))
