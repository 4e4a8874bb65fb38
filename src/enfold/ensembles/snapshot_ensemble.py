"""SnapshotEnsemble: one training whose learning rate restarts M times; the network at the end of a cycle is a member.

    α(t) = α_0 / 2 · (cos(π · ((t - 1) mod T/C) / (T/C)) + 1),      t = 1..T steps, C cycles      (1)
    θ_m = θ after the last but m-th cycle,      m = 0..M-1                                         (2)

G. Huang, Y. Li, G. Pleiss, Z. Liu, J. E. Hopcroft, K. Q. Weinberger: Snapshot Ensembles: Train 1, get M for free,
ICLR 2017, arXiv:1704.00109. Published: 5 cycles in 200 epochs for residual networks, SGD that restarts at 0.1 or 0.2.

Training costs as much as that of one network. M + 1 networks are in memory and in the file: the snapshots, and the
network that is trained. A snapshot has the batch-norm statistics it was trained with. Member 0 is the last snapshot, so
that M members are the first M of M + 1 of the same cycles.

Differs from the paper: a cycle is an integer number of epochs; a warm-up, which would shift the cycles, is omitted.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig


class TrajectoryEnsemble(SampledEnsemble):
    """Members that are copies of the network at epochs of one training.

    Args:
        network: The network to train.
        num_members: The number of members.
        engine: How members are run.
    """

    needs_centre = False

    def __init__(self, network: nn.Module, num_members: int, engine: EngineName) -> None:
        refuse_ties(network)
        super().__init__(network, num_members, engine)
        initial = self.centre.named_parameters()
        self.snapshots = Tree({name: t.detach().expand(num_members, *t.shape).clone() for name, t in initial})

    @abstractmethod
    def snapshot_epochs(self, config: TrainConfig) -> list[int]:
        """Return the M epochs, counted from 1, after which members are copied, the last one first."""

    def sample(self) -> State:
        """Return the snapshots, (2)."""
        return self.snapshots.state()

    @torch.no_grad()
    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Copy the network if this epoch is that of a snapshot."""
        epochs = self.snapshot_epochs(config)
        if epoch not in epochs:
            return
        centre = self.centre.state()
        for name, members in {**self.snapshots.state(), **self.own.state()}.items():
            members[epochs.index(epoch)].copy_(centre[name])  # (2)

    def on_fit_end(self, data: Data) -> None:
        """Make the snapshots available; their batch-norm statistics were copied with them."""
        self.ready.fill_(True)


@checked
class SnapshotEnsemble(TrajectoryEnsemble):
    """One training whose learning rate restarts; the network at the end of each of the last M cycles is a member.

    Args:
        network: The network to train. It is not modified.
        num_members: The number of members; 5 is published.
        cycles: The number of cycles, of which the last M give members; None: M.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 5,
        *,
        cycles: PositiveInt | None = None,
        engine: EngineName = "auto",
    ) -> None:
        if cycles is not None and cycles < num_members:
            raise EnfoldError(
                f"cycles must be at least num_members={num_members}, got {cycles}: raise cycles, or lower num_members"
            )
        super().__init__(network, num_members, engine)
        self.cycles = cycles

    @property
    def num_cycles(self) -> int:
        """C."""
        return self.cycles or self.num_members

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Use C cosine cycles to 0, (1), and train to the last epoch."""
        cycles = self.num_cycles
        if config.epochs < cycles or config.epochs % cycles:
            more = cycles * (config.epochs // cycles + 1)
            raise EnfoldError(
                f"epochs must be a multiple of the {cycles} cycles, got {config.epochs}: use epochs={more}, or change "
                "cycles"
            )
        cosine = config.replace(schedule="cosine", cycles=cycles, final_factor=0.0, warmup_epochs=0.0, tail="none")
        return cosine.replace(select="last", patience=None)

    def snapshot_epochs(self, config: TrainConfig) -> list[int]:
        """Return the ends of the last M of C cycles."""
        if config.epochs < self.num_cycles:
            raise EnfoldError(
                f"epochs must be at least the number of cycles, {self.num_cycles}, got {config.epochs}: raise epochs"
            )
        return [round(config.epochs * (self.num_cycles - m) / self.num_cycles) for m in range(self.num_members)]
