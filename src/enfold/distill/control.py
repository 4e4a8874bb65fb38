"""The control: one member given the same extra epochs and schedule as a fold, on labels alone.

Without it, extra training passes for ensembling: whatever a fold reaches beyond its control is what the ensemble gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from enfold.data import Data
from enfold.ensemble import Ensemble
from enfold.evaluate import best_member
from enfold.merge.common.inputs import require_members
from enfold.train import TrainConfig, fit
from enfold.train.history import warn_if_unchanged


@dataclass(frozen=True)
class Control:
    """The best member on validation data, trained on by the same plan with the labels."""

    plan: TrainConfig = field(default_factory=TrainConfig)

    def __call__(self, members: Ensemble, data: Data, *, checkpoint: Path | None = None) -> nn.Module:
        """The member after its extra training, as a network of the user's class."""
        members = require_members(members, "the control")
        best = best_member(members, data)
        network = members.member(best)
        history = fit(network, data, config=self.plan, checkpoint=checkpoint, title="control")
        remedy = "more training on the labels does not help it, or the learning rate is too high"
        warn_if_unchanged(history, "the control", f"member {best}", remedy)
        return network
