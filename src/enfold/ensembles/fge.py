"""FGE: after most of one training the learning rate goes up and down in short cycles; at each low point is a member.

    α(e) = (1 - 2t) α_1 + 2t α_2           for t = (e mod c) / c <= 1/2
           (2 - 2t) α_2 + (2t - 1) α_1     for t > 1/2,      e epochs after the start               (1)
    θ_m is taken where t = 1/2, at the lowest rate α_2                                              (2)

T. Garipov, P. Izmailov, D. Podoprikhin, D. Vetrov, A. G. Wilson: Loss Surfaces, Mode Connectivity, and Fast Ensembling
of DNNs, NeurIPS 2018, arXiv:1802.10026.

The rates are factors of the plan's: the authors' commands for residual networks train with 0.1 for 0.8 of 200 epochs
and go on with α_1 = 0.05, α_2 = 0.01 and cycles of c = 2 epochs, which gives 20 members; the defaults of their script
are α_2 = 0.0001 and c = 4. `start` is the latest start: cycles begin earlier where M of them need more epochs.

Training costs as much as one network's; M + 1 networks are in memory and in the file, as in a snapshot ensemble, and
member 0 is the last one taken. Batch-norm statistics are those each was trained with.

Differs from the paper: before the cycles the plan's schedule is used, a cosine going down to α_1.
"""

from __future__ import annotations

from dataclasses import dataclass

from enfold.engines.base import EngineName
from enfold.ensembles.common.sharing import require_size
from enfold.ensembles.snapshot_ensemble import Trajectory
from enfold.errors import EnfoldError
from enfold.train import TrainConfig


@dataclass(frozen=True)
class FGE(Trajectory):
    """Fast geometric ensembling: short triangular cycles of the learning rate, a member at each low point."""

    num_members: int = 4
    start: float = 0.8  # fraction of the epochs after which cycles begin, at the latest
    cycle: int = 2  # epochs from top to top, c; even, so that the low point is the end of an epoch
    high: float = 0.5  # α_1, of the plan's learning rate
    low: float = 0.1  # α_2, of the plan's learning rate
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.cycle < 2 or self.cycle % 2:
            raise EnfoldError(f"a cycle must be an even number of epochs, got {self.cycle}: 2 and 4 are published")
        if not 0 <= self.start < 1:
            raise EnfoldError(f"the start must be a part of the epochs in [0, 1), got {self.start}: 0.8 is published")
        if not 0 <= self.low <= self.high:
            raise EnfoldError(
                f"the rates must be 0 <= low <= high, got low={self.low} and high={self.high}: exchange them"
            )

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """Triangular cycles, equation (1), from the start on."""
        needed = (self.num_members - 1) * self.cycle + self.cycle // 2
        if plan.epochs <= needed:
            raise EnfoldError(
                f"{self.num_members} members need {needed} epochs of cycles after at least 1 of training, got "
                f"{plan.epochs} epochs: train for more than {needed}, or lower num_members"
            )
        begin = min(int(self.start * plan.epochs + 1e-9), plan.epochs - needed)
        return plan.replace(
            tail="triangular",
            tail_start=begin / plan.epochs,
            tail_factor=self.high,
            tail_low=self.low,
            tail_cycle=float(self.cycle),
            warmup_epochs=min(plan.warmup_epochs, float(begin)),
            select="last",
            patience=None,
        )

    def moments(self, plan: TrainConfig) -> list[int]:
        """The ends of epochs at which the rate is lowest, (2); the last M epochs where the plan has no cycles."""
        found = list(range(1, plan.epochs + 1))
        if plan.tail == "triangular":
            begin = round(plan.tail_start * plan.epochs)
            found = [epoch for epoch in found[begin:] if (epoch - begin) % plan.tail_cycle == plan.tail_cycle / 2]
        if len(found) < self.num_members:
            raise EnfoldError(
                f"{self.num_members} members need as many cycles, got a plan with {len(found)}: use FGE.adapted(plan)"
            )
        return found[::-1][: self.num_members]
