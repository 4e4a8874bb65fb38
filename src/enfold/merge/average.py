"""The naive average: the mean of the members' weights.

    θ̄ = (1/M) Σ_m θ_m                                                                        (1)

It is right for members that lie in one basin of the loss (checkpoints of one run, fine-tuned copies of one network) and
destroys members that were trained apart, whose hidden units are in different orders. It is here as the reference that
every merge must beat.

Batch-norm statistics of the averaged network are not the average of the statistics: they are measured again on the
training part, or (`reestimate_batch_norm=False`) averaged like everything else.

Differs from the paper: there is none; this is the baseline of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from enfold.data import Data
from enfold.ensemble import Ensemble
from enfold.merge.common.folding import Composable, mean_state, require_members
from enfold.train.batch_norm import reestimate


@dataclass(frozen=True)
class Average(Composable):
    """The mean of the members' weights."""

    reestimate_batch_norm: bool = True  # measure statistics again on the training part, instead of averaging them

    @torch.no_grad()
    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """One network with the mean weights; a single member is returned as it is."""
        members = require_members(members, "the average", averaged=True, data=data)
        if members.num_members == 1:
            return members.member(0).eval()
        network = members.network(mean_state(members))  # (1)
        if self.reestimate_batch_norm:
            reestimate(network, data)
        return network.eval()
