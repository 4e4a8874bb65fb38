"""FGE: after most of one training the learning rate runs through short cycles; the network at each minimum is a member.

    α(e) = (1 - 2t) α_1 + 2t α_2           for t = (e mod c) / c <= 1/2
           (2 - 2t) α_2 + (2t - 1) α_1     for t > 1/2,      e epochs after the start               (1)
    θ_m: the network where t = 1/2, at the lowest rate α                                            (2)

T. Garipov, P. Izmailov, D. Podoprikhin, D. Vetrov, A. G. Wilson: Loss Surfaces, Mode Connectivity, and Fast Ensembling
of DNNs, NeurIPS 2018, arXiv:1802.10026.

The rates are fractions of the learning rate: the authors' commands for residual networks train with 0.1 for 0.8 of 200
epochs and continue with α_1 = 0.05, α_2 = 0.01 and cycles of c = 2 epochs, which gives 20 members; the defaults of
their script are α_2 = 0.0001 and c = 4. `start` is the latest start: cycles begin earlier where M of them need more
epochs.

Training costs as much as that of one network; M + 1 networks are in memory and in the file, as in a snapshot ensemble,
and member 0 is the last one. A member has the batch-norm statistics it was trained with.

Differs from the paper: before the cycles the schedule of the training is used, a cosine that decreases to α_1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.options import NonNegative
from enfold.ensembles.snapshot_ensemble import TrajectoryEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig


@checked
class FGE(TrajectoryEnsemble):
    """Fast geometric ensembling: short triangular cycles of the learning rate, with a member at each minimum.

    Args:
        network: The network to train. It is not modified.
        num_members: The number of members.
        start: The fraction of the epochs after which cycles begin, at the latest.
        cycle: c: the number of epochs per cycle; even, so that the minimum is at the end of an epoch.
        high: α_1, as a fraction of the learning rate.
        low: α_2, as a fraction of the learning rate.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        start: Annotated[float, Field(ge=0, lt=1)] = 0.8,
        cycle: Annotated[int, Field(ge=2, multiple_of=2)] = 2,
        high: NonNegative = 0.5,
        low: NonNegative = 0.1,
        engine: EngineName = "auto",
    ) -> None:
        if low > high:
            raise EnfoldError(f"low must be at most high, got low={low} and high={high}: exchange them")
        super().__init__(network, num_members, engine)
        self.start, self.cycle, self.high, self.low = start, cycle, high, low

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Use triangular cycles, (1), from `start` on, and train to the last epoch."""
        needed = (self.num_members - 1) * self.cycle + self.cycle // 2
        if config.epochs <= needed:
            raise EnfoldError(
                f"epochs must be more than the {needed} epochs of cycles for {self.num_members} members, got "
                f"{config.epochs}: raise epochs, or lower num_members"
            )
        begin = min(int(self.start * config.epochs + 1e-9), config.epochs - needed)
        return config.replace(
            tail="triangular",
            tail_start=begin / config.epochs,
            tail_factor=self.high,
            tail_low=self.low,
            tail_cycle=float(self.cycle),
            warmup_epochs=min(config.warmup_epochs, float(begin)),
            select="last",
            patience=None,
        )

    def snapshot_epochs(self, config: TrainConfig) -> list[int]:
        """Return the epochs that end at the lowest rate, (2); the last M where the configuration has no cycles."""
        epochs = list(range(1, config.epochs + 1))
        if config.tail == "triangular":
            begin = round(config.tail_start * config.epochs)
            epochs = [epoch for epoch in epochs[begin:] if (epoch - begin) % config.tail_cycle == config.tail_cycle / 2]
        if len(epochs) < self.num_members:
            raise EnfoldError(
                f"config must have {self.num_members} cycles, got {len(epochs)}: use the result of configure(config)"
            )
        return epochs[::-1][: self.num_members]
