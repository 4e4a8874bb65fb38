"""SWA: one network whose weights are the mean over the last epochs of a training at a constant learning rate.

    θ̄_n = θ̄_{n-1} + (θ_n - θ̄_{n-1}) / n      at the end of each epoch after `start`                          (1)

P. Izmailov, D. Podoprikhin, T. Garipov, D. Vetrov, A. G. Wilson: Averaging Weights Leads to Wider Optima and Better
Generalization, UAI 2018, arXiv:1803.05407.

The schedule of the training runs until `start`, a fraction of the epochs, and ends at `rate`, a fraction of the
learning rate, which then stays constant. The settings of wjmaddox/swa_gaussian for a PreResNet-164 are 161 of 300
epochs and, from 0.1, a rate of 0.05 for CIFAR-100 (0.5, the default) and of 0.01 for CIFAR-10 (0.1). When training
ends, batch-norm statistics are estimated with the mean weights on the training data. `ensemble.member(0)` is the
network.

Memory: one more copy of the weights.

Differs from the paper: no cyclical rate; the mean is in single precision where weights are in half precision.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.ensembles.common.options import Positive
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig

START = 161 / 300
Start = Annotated[float, Field(ge=0, lt=1)]


class AveragedEnsemble(SampledEnsemble):
    """A running mean of the weights of the centre, collected at the end of each epoch after `start`.

    Args:
        network: The network to train.
        num_members: The number of members.
        start: The fraction of the epochs after which weights are collected.
        rate: The learning rate from `start` on, as a fraction of that of the training.
        engine: How members are run.
    """

    count: Tensor  # epochs in the mean
    needs_centre = False
    least_epochs: ClassVar[int] = 1  # to collect

    def __init__(self, network: nn.Module, num_members: int, start: float, rate: float, engine: EngineName) -> None:
        super().__init__(network, num_members, engine)
        self.start, self.rate = start, rate
        self.mean = Tree(self._like_weights())
        self.register_buffer("count", torch.tensor(0))

    def configure(self, config: TrainConfig) -> TrainConfig:
        """End the schedule at `start` with a constant learning rate, and train to the last epoch."""
        remaining = config.epochs - epochs_before(self.start, config.epochs)
        if remaining < self.least_epochs:
            raise EnfoldError(
                f"epochs must leave {self.least_epochs} or more after start={self.start:.3g} of the training, got "
                f"{remaining} of {config.epochs} for {type(self).__name__}: raise epochs, or lower start"
            )
        return config.replace(
            tail="constant", tail_start=self.start, tail_factor=self.rate, select="last", patience=None
        )

    def _like_weights(self, *leading: int) -> State:
        """Return zeros of the shapes of the weights, at least in single precision."""
        named = {name: tensor for name, tensor in self.centre.state().items() if name in self.skeleton.parameters}
        return {
            name: tensor.new_zeros(
                (*leading, *tensor.shape), dtype=torch.promote_types(tensor.dtype, torch.float32), requires_grad=False
            )
            for name, tensor in named.items()
        }

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Start a new mean."""
        super().on_fit_start(data, config)
        self.count.zero_()

    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Collect the weights if `start` has passed."""
        if epoch > epochs_before(self.start, config.epochs):
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Update the mean by the weights of the centre, (1)."""
        self.count += 1
        centre = self.centre.state()
        for name, mean in self.mean.state().items():
            mean.lerp_(centre[name].to(mean.dtype), 1 / int(self.count))  # (1)

    def sample(self) -> State:
        """Return the mean as the only member."""
        centre = self.centre.state()
        return {name: mean.to(centre[name].dtype)[None] for name, mean in self.mean.state().items()}

    def on_fit_end(self, data: Data) -> None:
        """Make the members available, with batch-norm statistics of their own."""
        if int(self.count) < self.least_epochs:
            raise EnfoldError(
                f"{type(self).__name__} needs the weights of {self.least_epochs} or more epochs, got "
                f"{int(self.count)}: raise epochs"
            )
        super().on_fit_end(data)


def epochs_before(start: float, epochs: int) -> int:
    """Return the number of epochs before the first that is collected."""
    return math.floor(start * epochs + 1e-9)  # 161 / 300 of 300 epochs are 161, also as a float


@checked
class SWA(AveragedEnsemble):
    """One network: the mean of the weights at the ends of the last epochs.

    Args:
        network: The network to train. It is not modified.
        num_members: 1: the mean is one network. For members around the mean, use SWAG.
        start: The fraction of the epochs after which weights are averaged.
        rate: The learning rate from `start` on, as a fraction of that of the training.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: Literal[1] = 1,
        *,
        start: Start = START,
        rate: Positive = 0.5,
        engine: EngineName = "auto",
    ) -> None:
        super().__init__(network, num_members, start, rate, engine)
