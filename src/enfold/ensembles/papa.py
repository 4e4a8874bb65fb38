"""PAPA: members are trained together and pulled towards their mean, so that they can be averaged into one network.

    θ̄ = (1/M) Σ_m θ_m

    gradual:  θ_m <- a θ_m + (1 - a) θ̄                  after every 10th step                         (1)
    all:      θ_m <- θ̄                                  after every 5th epoch                         (2)
    pairs:    θ_m <- (θ_i + θ_j) / 2,   i ≠ j drawn      after every 5th epoch        (PAPA-2)         (3)

A. Jolicoeur-Martineau, E. Gervais, K. Fatras, Y. Zhang, S. Lacoste-Julien: PopulAtion Parameter Averaging (PAPA), TMLR
2024, arXiv:2304.03094.

Training holds M networks; the result is their average, `enfold.merge.average(ensemble, train)`. Running statistics are
averaged as weights are, counters are not. The authors recommend a = 0.999^k for every k steps. (2) and (3) start after
the first epoch, as in the public code, and do not follow the last one. Members differ in their order of the data and in
label smoothing, taken in turn from `smoothing` unless the training configuration sets it. The last epoch is used, as
members depend on each other.

Differs from the paper: members start as copies of the network, so that trained weights are used; with start="own" every
member has its own initialisation, as published, and thousands of steps are needed until members are close (0.99 every
10 steps halves a distance in 700). There is no mixup, which the paper varies besides smoothing, and no REPAIR after (2)
and (3); `average` estimates batch-norm statistics again.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.initialization import initialize_member
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import Fraction
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.tasks import may_have_classes
from enfold.train import TrainConfig
from enfold.train.optimize import Optimizer

Start = Literal["network", "own"]


@checked
class PAPA(DeepEnsemble):
    """Members that are trained together and pulled towards their mean.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        kind: "gradual": members move a little towards the mean, (1); "all": they become the mean, (2); "pairs": each
            becomes the mean of two, (3).
        keep: a: the weight of a member's own parameters in (1).
        every_steps: The number of steps from one pull to the next, for "gradual".
        every_epochs: The number of epochs from one average to the next, for "all" and "pairs".
        smoothing: Label smoothing of the members, in turn; empty: that of the training configuration. It is not used
            with task="regression".
        start: Members start as copies of the network, or each with its own initialisation ("own").
        seed: The seed of initialisations and pairs.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        kind: Literal["gradual", "all", "pairs"] = "gradual",
        keep: Fraction = 0.99,
        every_steps: PositiveInt = 10,
        every_epochs: PositiveInt = 5,
        smoothing: tuple[float, ...] = (0.0, 0.05, 0.1),
        start: Start = "network",
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        super().__init__(make_population(network, num_members, start, seed), engine=engine)
        self.kind, self.keep, self.every_steps, self.every_epochs = kind, keep, every_steps, every_epochs
        self.smoothing, self.start, self.seed = smoothing, start, seed

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train all members to the last epoch, each with its label smoothing; a regression has none."""
        config = train_to_last_epoch(config)
        if not self.smoothing or config.label_smoothing != 0.0 or not may_have_classes(config.task):
            return config
        own = tuple(self.smoothing[member % len(self.smoothing)] for member in range(self.num_members))
        return config.replace(label_smoothing=own)

    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Apply (1) every `every_steps` steps."""
        if self.kind == "gradual" and step % self.every_steps == 0:
            self.pull(self.keep)

    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Apply (2) or (3) every `every_epochs` epochs."""
        if (epoch - 1) % self.every_epochs or epoch == config.epochs:
            return
        if self.kind == "all":
            self.pull(0.0)
        elif self.kind == "pairs":
            self.pair(epoch)

    @torch.no_grad()
    def pull(self, keep: float) -> None:
        """Move all members towards their mean, (1); with keep = 0 it is (2)."""
        for values in self._tensors():
            values.lerp_(values.mean(dim=0, keepdim=True), 1 - keep)  # (1), (2)

    @torch.no_grad()
    def pair(self, epoch: int) -> None:
        """Replace members by averages of pairs, (3), which depend on the seed and the epoch."""
        if self.num_members < 2:
            return
        source = generator(self.seed, "papa", "pairs", epoch)
        drawn = [torch.randperm(self.num_members, generator=source)[:2] for _ in range(self.num_members)]
        first, second = torch.stack(drawn).unbind(1)  # (M,) each
        for values in self._tensors():
            values.copy_((values[first] + values[second]) / 2)  # (3)

    def _tensors(self) -> list[Tensor]:
        return [values for values in self.expand().values() if values.is_floating_point() or values.is_complex()]


def make_population(network: nn.Module | Factory, num_members: int, start: Start, seed: int) -> list[nn.Module]:
    """Return M networks: copies of one, or M with their own initialisation.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        start: Whether members start from one network or from their own initialisations.
        seed: The seed.
    """
    if isinstance(network, nn.Module):
        refuse_ties(network)
    if start == "own":
        return [initialize_member(network, seed, member)[0] for member in range(num_members)]
    return [network if isinstance(network, nn.Module) else initialize_member(network, seed, 0)[0]] * num_members


def train_to_last_epoch(config: TrainConfig) -> TrainConfig:
    """Return the configuration without a selection of epochs, as members depend on each other."""
    if config.patience is not None:
        raise EnfoldError(
            f"patience must be None for members that depend on each other, got {config.patience}: leave patience out"
        )
    return config.replace(select="last")
