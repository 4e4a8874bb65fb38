"""SWA: one network whose weights are the mean of those that training passes through at a constant learning rate.

    θ̄_n = θ̄_{n-1} + (θ_n - θ̄_{n-1}) / n      at the end of each epoch after `start`                          (1)

P. Izmailov, D. Podoprikhin, T. Garipov, D. Vetrov, A. G. Wilson: Averaging Weights Leads to Wider Optima and Better
Generalization, UAI 2018, arXiv:1803.05407.

The plan's schedule runs until `start`, a fraction of the epochs, and ends at `rate`, a fraction of the learning rate,
which is then kept. The settings of wjmaddox/swa_gaussian for a PreResNet-164 are 161 of 300 epochs and, from 0.1, a
rate of 0.05 for CIFAR-100 (0.5, the default) and of 0.01 for CIFAR-10 (0.1). When training ends, batch-norm statistics
are measured with the mean weights on the training part. `members.member(0)` is the network.

Memory: one more copy of the weights.

Differs from the paper: no cyclical rate; the mean is kept in single precision where weights are in half; nothing else
known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.sampling import Sampled
from enfold.ensembles.common.sharing import Share, require_size
from enfold.errors import EnfoldError
from enfold.train import TrainConfig

START = 161 / 300


@dataclass(frozen=True)
class SWA(Share):
    """One network: the mean of the weights at the ends of the last epochs."""

    num_members: int = 1  # the mean, which is one network
    start: float = START  # fraction of the epochs after which weights are averaged
    rate: float = 0.5  # fraction of the plan's learning rate that is kept from `start` on
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.num_members > 1:
            raise EnfoldError(
                f"SWA makes one network, got num_members={self.num_members}: leave it out, or draw members around the "
                f"mean with swag and num_members: {self.num_members}"
            )
        require_tail(self.start, self.rate)

    def __call__(self, network: nn.Module) -> Averaged:
        """The network, ready to be trained and averaged."""
        return Averaged(network, self, self.start, self.engine)

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """The plan with a constant rate from `start` on, and no choice among epochs."""
        return with_tail(plan, self, self.start, self.rate, Averaged.least)


class Averaged(Sampled):
    """The mean of the centre's weights so far; there is one member, the mean itself."""

    count: Tensor
    needs_centre = False
    least = 1  # epochs to average

    def __init__(self, network: nn.Module, share: Share, start: float, engine: EngineName) -> None:
        super().__init__(network, share.num_members, engine)
        self.share = share
        self.start = start
        self.mean = Tree(self._like_weights())
        self.register_buffer("count", torch.tensor(0))

    def _like_weights(self, *leading: int) -> State:
        """Zeros as large as the weights, in single precision at least."""
        named = {name: tensor for name, tensor in self.centre.state().items() if name in self.skeleton.parameters}
        return {
            name: tensor.new_zeros(
                (*leading, *tensor.shape), dtype=torch.promote_types(tensor.dtype, torch.float32), requires_grad=False
            )
            for name, tensor in named.items()
        }

    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """Take the weights into the mean if `start` has passed; a training begun anew begins a new mean."""
        if epoch == 1:
            require_epochs(plan, self.share, self.start, self.least)
            self.count.zero_()
            self.ready.fill_(False)
        if epoch > before_start(self.start, plan.epochs):
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Equation (1) with the centre's weights."""
        self.count += 1
        centre = self.centre.state()
        for name, mean in self.mean.state().items():
            mean.lerp_(centre[name].to(mean.dtype), 1 / int(self.count))  # (1)

    def sample(self) -> State:
        """The mean."""
        centre = self.centre.state()
        return {name: mean.to(centre[name].dtype)[None] for name, mean in self.mean.state().items()}

    def finish(self, data: Data) -> None:
        """Batch-norm statistics of what was made of the epochs that were averaged."""
        if int(self.count) < self.least:
            name = type(self.share).__name__
            raise EnfoldError(
                f"{name} needs the weights of {self.least} or more epochs, got {int(self.count)}: train with "
                f"{name}().train, or with select: last for more epochs"
            )
        super().finish(data)


def require_tail(start: float, rate: float) -> None:
    """Epochs are left to average, at a rate that moves."""
    if not 0 <= start < 1:
        raise EnfoldError(f"averaging must start within the training, in [0, 1), got start={start}: lower it")
    if rate <= 0:
        raise EnfoldError(f"the rate while averaging must be above 0, got rate={rate}: 0.5 is the published one")


def before_start(start: float, epochs: int) -> int:
    """How many epochs pass before the first that is averaged."""
    return math.floor(start * epochs + 1e-9)  # 161 / 300 of 300 epochs are 161, also as a float


def require_epochs(plan: TrainConfig, share: Share, start: float, least: int) -> None:
    """Refuse a plan that leaves too few epochs to average."""
    left = plan.epochs - before_start(start, plan.epochs)
    if left < least:
        raise EnfoldError(
            f"{type(share).__name__} needs {least} or more epochs after start={start:.3g} of the training, got {left} "
            f"of {plan.epochs}: train for more epochs, or start earlier"
        )


def with_tail(plan: TrainConfig, share: Share, start: float, rate: float, least: int) -> TrainConfig:
    """The plan whose schedule ends at `start` at a fraction of the learning rate, which is kept to the last epoch."""
    require_epochs(plan, share, start, least)
    return plan.replace(tail="constant", tail_start=start, tail_factor=rate, select="last", patience=None)
