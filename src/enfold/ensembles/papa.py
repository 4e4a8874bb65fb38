"""PAPA: members are trained side by side and pulled to their mean, so that they end in one basin and may be averaged.

    θ̄ = (1/M) Σ_m θ_m

    gradual:  θ_m <- a θ_m + (1 - a) θ̄                  after every 10th step                         (1)
    all:      θ_m <- θ̄                                  after every 5th epoch                         (2)
    pairs:    θ_m <- (θ_i + θ_j) / 2,   i ≠ j drawn      after every 5th epoch        (PAPA-2)         (3)

A. Jolicoeur-Martineau, E. Gervais, K. Fatras, Y. Zhang, S. Lacoste-Julien: PopulAtion Parameter Averaging (PAPA), TMLR
2024, arXiv:2304.03094.

It holds M networks while it trains; the result is their average, `merge.average(members)`. Running statistics are
pulled as weights are, counters are not. The authors advise a = 0.999^k for every k steps; a is not tied to the learning
rate. (2) and (3) start after the first epoch, as in the public code, and leave the last one alone. Members differ in
their data order and label smoothing, taken in turn from `smoothing` unless the plan has its own. Members are kept as
they are after the last epoch: the best epochs of single members are no population.

Differs from the paper: members start as the network given, so that trained weights are kept; start="own" draws each
anew, which is published, and needs thousands of steps until members have come together (0.99 every 10 steps halves a
distance in 700). There is no mixup, which the paper varies beside smoothing, and no REPAIR after (2) and (3); `average`
measures the batch norms' statistics again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.initialization import initialised
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.train import Follower, TrainConfig
from enfold.train.optimize import Optimizer

Kind = Literal["gradual", "all", "pairs"]
Start = Literal["network", "own"]


@dataclass(frozen=True)
class PAPA(Share):
    """Members that are trained side by side and pulled to their mean."""

    num_members: int = 4
    kind: Kind = "gradual"  # pulled a little, set to the mean of all, or to that of two
    keep: float = 0.99  # a: what a member keeps of itself at each pull
    every_steps: int = 10  # gradual: steps from pull to pull
    every_epochs: int = 5  # all and pairs: epochs from one to the next
    smoothing: tuple[float, ...] = (0.0, 0.05, 0.1)  # label smoothing of members, in turn; () leaves the plan's
    start: Start = "network"  # members start as the network given, or each drawn anew
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.kind not in get_args(Kind):
            raise EnfoldError(f"there is no PAPA of kind {self.kind!r}: choose one of {', '.join(get_args(Kind))}")
        if not 0 <= self.keep <= 1:
            raise EnfoldError(f"what a member keeps of itself must be between 0 and 1, got {self.keep}: try 0.99")
        for field in ("every_steps", "every_epochs"):
            if getattr(self, field) < 1:
                raise EnfoldError(f"{field} must be at least 1, got {getattr(self, field)}: raise it")
        require_start(self.start)

    def __call__(self, network: nn.Module) -> PAPAMembers:
        """M networks that will be trained together."""
        members = PAPAMembers(population(network, self.num_members, self.start, self.seed), self.engine)
        members.share = self
        return members

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """All members to the last epoch, each with its label smoothing."""
        plan = to_the_end(plan)
        if not self.smoothing or plan.label_smoothing != 0.0:
            return plan
        own = tuple(self.smoothing[member % len(self.smoothing)] for member in range(self.num_members))
        return plan.replace(label_smoothing=own)


class PAPAMembers(DeepEnsemble, Follower):
    """The population."""

    share: PAPA

    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """Equation (1), where it is time."""
        if self.share.kind == "gradual" and step % self.share.every_steps == 0:
            self.pull(self.share.keep)

    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """Equation (2) or (3), where it is time."""
        if (epoch - 1) % self.share.every_epochs or epoch == plan.epochs:
            return
        if self.share.kind == "all":
            self.pull(0.0)
        elif self.share.kind == "pairs":
            self.pair(epoch)

    @torch.no_grad()
    def pull(self, keep: float) -> None:
        """Equation (1); with keep = 0 it is (2)."""
        for values in self._averaged():
            values.lerp_(values.mean(dim=0, keepdim=True), 1 - keep)  # (1), (2)

    @torch.no_grad()
    def pair(self, epoch: int) -> None:
        """Equation (3) with pairs that depend on the seed and the epoch."""
        if self.num_members < 2:
            return
        source = generator(self.share.seed, "papa", "pairs", epoch)
        drawn = [torch.randperm(self.num_members, generator=source)[:2] for _ in range(self.num_members)]
        first, second = torch.stack(drawn).unbind(1)  # (M,) each
        for values in self._averaged():
            values.copy_((values[first] + values[second]) / 2)  # (3)

    def _averaged(self) -> list[Tensor]:
        return [values for values in self.expand().values() if values.is_floating_point() or values.is_complex()]


def population(network: nn.Module, num_members: int, start: Start, seed: int) -> list[nn.Module]:
    """M networks: the one given, or M drawn anew."""
    refuse_ties(network)
    if start == "network":
        return [network] * num_members
    return [initialised(network, seed, member)[0] for member in range(num_members)]


def require_start(start: Start) -> None:
    """There are two starts."""
    if start not in get_args(Start):
        raise EnfoldError(f"members start as the 'network' or on their 'own', got {start!r}: choose one of them")


def to_the_end(plan: TrainConfig) -> TrainConfig:
    """The plan without a choice of epochs: members of one population stay together."""
    if plan.patience is not None:
        raise EnfoldError(
            f"members that are trained as one population cannot stop one by one, got patience={plan.patience}: "
            "leave patience out"
        )
    return plan.replace(select="last")
