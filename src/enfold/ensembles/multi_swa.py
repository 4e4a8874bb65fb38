"""MultiSWA: M independent trainings, each averaged in weight space over its last epochs, then ensembled.

    θ̄_m = (1/K) Σ_k θ_mk,      θ_mk: run m after each of the last K epochs        (1)
    p = (1/M) Σ_m softmax f(x; θ̄_m)                                               (2)

"WA+Ens" of S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
Published: epochs 30 to 39 of 40.

The gains of averaging weights within a mode and predictions over modes add up. The number of parameters is that of a
deep ensemble; the averages are a second copy of them, in memory and in the file.

Differs from the paper: batch-norm statistics, which its networks do not have, are re-estimated after averaging.
"""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import Fraction
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate


@checked
class MultiSWA(DeepEnsemble):
    """Independent members, each the average of its weights after the last epochs.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        start: The fraction of the epochs after which weights are averaged; 1 uses the last epoch, as a deep ensemble.
        seed: The seed of the members' initialisation.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    count: Tensor  # (M,) epochs in the average

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        start: Fraction = 0.75,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed=seed, engine=engine)
        self.start = start
        trained = {name: tensor for name, tensor in self.tree.state().items() if name in self.skeleton.trainable}
        self.mean = Tree({name: tensor.detach().clone() for name, tensor in trained.items()})
        self.register_buffer("count", torch.zeros(self.num_members, dtype=torch.long))

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train to the last epoch, without selecting the best one."""
        return config.replace(select="last", patience=None)

    def is_averaged(self, epoch: int, epochs: int) -> bool:
        """Return whether the weights after this epoch, counted from 1, are averaged; the last epoch's always are."""
        return epoch == epochs or epoch > self.start * epochs + 1e-9

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Start a new average."""
        self.count.zero_()

    @torch.no_grad()
    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Update the averages, (1)."""
        if not self.is_averaged(epoch, config.epochs):
            return
        self.count += 1
        current = self.tree.state()
        for name, mean in self.mean.state().items():
            mean.lerp_(current[name], 1 / int(self.count[0]))  # (1)

    @torch.no_grad()
    def on_fit_end(self, data: Data) -> None:
        """Set the parameters to the averages, if of more than one epoch, and estimate batch-norm statistics again."""
        averaged = [index for index, count in enumerate(self.count.tolist()) if count > 1]
        self.count.zero_()
        current = self.tree.state()
        for name, mean in self.mean.state().items():
            current[name][averaged] = mean[averaged]
        for index in averaged if self.skeleton.buffers else ():
            network = self.member(index)
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name in self.skeleton.buffers:
                current[name][index].copy_(buffers[name])
