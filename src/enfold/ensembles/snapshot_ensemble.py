"""Snapshot ensembles: one training whose learning rate restarts M times, each cycle's end being a member.

    α(t) = α_0 / 2 · (cos(π · ((t - 1) mod T/C) / (T/C)) + 1),      t = 1..T steps, C cycles      (1)
    θ_m = θ after the last but m-th cycle,      m = 0..M-1                                         (2)

G. Huang, Y. Li, G. Pleiss, Z. Liu, J. E. Hopcroft, K. Q. Weinberger: Snapshot Ensembles: Train 1, get M for free,
ICLR 2017, arXiv:1704.00109. Published: 5 cycles in 200 epochs for residual networks, SGD that restarts at 0.1 or 0.2.

Training costs as much as one network's. What is stored, and run, is M networks as in a deep ensemble, beside the one
that is trained: M + 1 networks in memory and in the file. Each snapshot keeps the batch-norm statistics it was trained
with. Member 0 is the last snapshot, so that M members are the first M of M + 1 of the same cycles.

Differs from the paper: a cycle is a whole number of epochs, so a warm-up, which would shift the cycles, is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.sampling import Sampled
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.errors import EnfoldError
from enfold.train import TrainConfig


class Trajectory(Share):
    """Members that are networks met along one training."""

    engine: EngineName

    @abstractmethod
    def moments(self, plan: TrainConfig) -> list[int]:
        """The M epochs, counted from 1, after which members are taken, the newest first."""

    def __call__(self, network: nn.Module) -> Snapshots:
        """The network, and room for M members that its training will pass."""
        return Snapshots(network, self)


@dataclass(frozen=True)
class SnapshotEnsemble(Trajectory):
    """One training whose learning rate restarts; the network at each of the last M cycles' end is a member."""

    num_members: int = 5
    cycles: int | None = None  # restarts, of which the last M are kept; None: M
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.cycles is not None and self.cycles < self.num_members:
            raise EnfoldError(
                f"there must be a cycle for each of {self.num_members} members, got {self.cycles} cycles: raise cycles"
            )

    @property
    def num_cycles(self) -> int:
        """C."""
        return self.cycles or self.num_members

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """Equation (1), C times through the cosine to 0; the last epoch's weights are not replaced by better ones."""
        cycles = self.num_cycles
        if plan.epochs < cycles or plan.epochs % cycles:
            more = cycles * (plan.epochs // cycles + 1)
            raise EnfoldError(
                f"snapshots are taken after {cycles} equal cycles of whole epochs, got {plan.epochs} epochs: "
                f"train for {more}, or change cycles"
            )
        cosine = plan.replace(schedule="cosine", cycles=cycles, final_factor=0.0, warmup_epochs=0.0, tail="none")
        return cosine.replace(select="last", patience=None)

    def moments(self, plan: TrainConfig) -> list[int]:
        """The ends of the last M of C equal parts of the training."""
        if plan.epochs < self.num_cycles:
            raise EnfoldError(
                f"{self.num_cycles} snapshots need as many epochs, got {plan.epochs}: train longer, or ask for fewer"
            )
        return [round(plan.epochs * (self.num_cycles - m) / self.num_cycles) for m in range(self.num_members)]


class Snapshots(Sampled):
    """The members; `kept` holds their parameters as (M, ...), `own` their buffers."""

    needs_centre = False

    def __init__(self, network: nn.Module, share: Trajectory) -> None:
        refuse_ties(network)
        super().__init__(network, share.num_members, share.engine)
        self.share = share
        start = self.centre.named_parameters()
        self.kept = Tree({name: t.detach().expand(self.num_members, *t.shape).clone() for name, t in start})

    def sample(self) -> State:
        """What was kept, equation (2)."""
        return self.kept.state()

    @torch.no_grad()
    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """Keep the network if this epoch is one of the moments."""
        moments = self.share.moments(plan)
        if epoch not in moments:
            return
        centre = self.centre.state()
        for name, members in {**self.kept.state(), **self.own.state()}.items():
            members[moments.index(epoch)].copy_(centre[name])  # (2)

    def finish(self, data: Data) -> None:
        """The members are there; their batch-norm statistics were kept with them."""
        self.ready.fill_(True)
