"""MultiSWA: M independent trainings, each averaged in weight space over its last epochs, then ensembled.

    θ̄_m = (1/K) Σ_k θ_mk,      θ_mk: run m after each of the last K epochs        (1)
    p = (1/M) Σ_m softmax f(x; θ̄_m)                                               (2)

"WA+Ens" of S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
Published: epochs 30 to 39 of 40.

Averaging inside a mode and averaging over modes add to each other. There are as many parameters as in a deep ensemble;
the running means are a second copy of them, in memory and in the file.

Differs from the paper: batch-norm statistics, which its networks do not have, are re-estimated after averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.tree import Tree
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train import Follower, TrainConfig
from enfold.train.batch_norm import reestimate


@dataclass(frozen=True)
class MultiSWA(Share):
    """Independent members, each the average of its weights after the last epochs."""

    num_members: int = 4
    start: float = 0.75  # of the epochs: what comes later is averaged; 1: the last epoch alone, a plain deep ensemble
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if not 0 <= self.start <= 1:
            raise EnfoldError(f"the start must be a part of the epochs in [0, 1], got {self.start}: 0.75 is published")

    def __call__(self, network: nn.Module) -> AveragedModesMembers:
        """M re-initialised copies."""
        refuse_ties(network)
        members = AveragedModesMembers.make(network, self.num_members, seed=self.seed, engine=self.engine)
        members.share = self
        return members

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """The last epochs are averaged, not chosen from."""
        return plan.replace(select="last", patience=None)

    def averages(self, epoch: int, epochs: int) -> bool:
        """Whether the weights after this epoch, counted from 1, are part of the average; the last one's always are."""
        return epoch == epochs or epoch > self.start * epochs + 1e-9


class AveragedModesMembers(DeepEnsemble, Follower):
    """The members; in training the current weights run, and `mean` follows them."""

    count: Tensor  # (M,) checkpoints in the mean; one a member, as everything of theirs has the member axis

    def __init__(self, networks: Sequence[nn.Module], engine: EngineName = "auto") -> None:
        super().__init__(networks, engine)
        trained = {name: tensor for name, tensor in self.tree.state().items() if name in self.skeleton.trainable}
        self.mean = Tree({name: tensor.detach().clone() for name, tensor in trained.items()})
        self.register_buffer("count", torch.zeros(self.num_members, dtype=torch.long))

    def begin(self) -> None:
        """Another training averages anew."""
        self.count.zero_()

    @torch.no_grad()
    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """The running form of equation (1)."""
        if not self.share.averages(epoch, plan.epochs):
            return
        self.count += 1
        current = self.tree.state()
        for name, mean in self.mean.state().items():
            mean.lerp_(current[name], 1 / int(self.count[0]))  # (1)

    @torch.no_grad()
    def finish(self, data: Data) -> None:
        """Put the means into the parameters and measure batch-norm statistics; one checkpoint is left as it is."""
        averaged = [index for index, count in enumerate(self.count.tolist()) if count > 1]
        self.count.zero_()  # another training averages anew
        current = self.tree.state()
        for name, mean in self.mean.state().items():
            current[name][averaged] = mean[averaged]
        for index in averaged if self.skeleton.buffers else ():
            network = self.member(index)
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name in self.skeleton.buffers:
                current[name][index].copy_(buffers[name])
