"""WASH: members are trained side by side and swap a few weights in every step, which keeps them in one basin.

    for each scalar weight i of layer l, with probability p_l:   θ_m[i] <- θ_π(m)[i],   π drawn for i  (1)
    p_l = p (1 - l / (L - 1)),     l = 0 .. L - 1                                                      (2)

L. Fournier, A. Nabli, M. Aminbeidokhti, M. Pedersoli, E. Belilovsky, E. Oyallon: WASH: Train your Ensemble with
Communication-Efficient Weight Shuffling, then Average, arXiv:2405.17517.

It holds M networks while it trains; the result is their average, `merge.average(members)`. A shuffle changes neither
the mean nor the spread of a weight over members. Layers are the modules that own trainable parameters, in the network's
listing; the last is not shuffled (schedule="constant" gives all of them p). With `optimizer_state` the optimizer's
memory of a weight goes with it (WASH+Opt). Running statistics stay where they are. The draws of a step depend on the
seed and the step. Members are kept as they are after the last epoch.

Differs from the paper: the authors' code was not at hand, so how they count layers may differ, and p = 0.001 is theirs
for trainings of many thousand steps only as far as we know; trainings of some hundred need 0.01 to 0.05. Members start
as the network given; start="own" draws each anew, where swaps scramble what has little in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.ensembles.common.sharing import Share, require_size
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.papa import Start, population, require_start, to_the_end
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.train import Follower, TrainConfig
from enfold.train.optimize import Optimizer


@dataclass(frozen=True)
class WASH(Share):
    """Members that are trained side by side and swap a few weights in every step."""

    num_members: int = 4
    probability: float = 0.001  # p: of a weight to be swapped in a step
    schedule: Literal["decreasing", "constant"] = "decreasing"  # p falls to 0 at the last layer, or is the same for all
    optimizer_state: bool = False  # WASH+Opt: the optimizer's memory of a weight goes with it
    start: Start = "network"  # members start as the network given, or each drawn anew
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if not 0 <= self.probability <= 1:
            raise EnfoldError(f"a probability must be between 0 and 1, got {self.probability}: try 0.01")
        if self.schedule not in ("decreasing", "constant"):
            raise EnfoldError(f"the schedule must be 'decreasing' or 'constant', got {self.schedule!r}: choose one")
        require_start(self.start)

    def __call__(self, network: nn.Module) -> WASHMembers:
        """M networks that will be trained together."""
        members = WASHMembers(population(network, self.num_members, self.start, self.seed), self.engine)
        members.share = self
        return members

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """All members to the last epoch."""
        return to_the_end(plan)


class WASHMembers(DeepEnsemble, Follower):
    """The population."""

    share: WASH

    def probabilities(self) -> dict[str, float]:
        """p_l of every trainable parameter."""
        names = [name for name in self.skeleton.parameters if name in self.skeleton.trainable]
        layers = {name: name.rpartition(".")[0] for name in names}
        depth = {layer: index for index, layer in enumerate(dict.fromkeys(layers.values()))}
        if self.share.schedule == "constant" or len(depth) == 1:
            return dict.fromkeys(names, self.share.probability)
        return {name: self.share.probability * (1 - depth[layers[name]] / (len(depth) - 1)) for name in names}  # (2)

    @torch.no_grad()
    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """Equation (1)."""
        if self.num_members < 2:
            return
        source = generator(self.share.seed, "wash", step)
        stored = self.tree.state()
        for name, probability in self.probabilities().items():
            values = stored[name]
            swapped = torch.rand(values.shape[1:], generator=source) < probability
            order = torch.rand(self.num_members, int(swapped.sum()), generator=source).argsort(dim=0)  # (M, swapped)
            if not order.numel():
                continue
            swapped, order = swapped.to(values.device), order.to(values.device)
            shuffle(values.unbind(0), swapped, order)
            if self.share.optimizer_state:
                for memory in memories(optimizer, values):
                    shuffle(memory, swapped, order)


def shuffle(members: Sequence[Tensor], swapped: Tensor, order: Tensor) -> None:
    """Give member m the value of member order[m] at every place that is swapped, in place."""
    values = torch.stack([member[swapped] for member in members]).gather(0, order)  # (1), (M, swapped)
    for member, new in zip(members, values, strict=True):
        member[swapped] = new


def memories(optimizer: Optimizer, parameter: Tensor) -> Iterator[Sequence[Tensor]]:
    """What the optimizer remembers of a stacked parameter's values, each as M tensors of one member's shape."""
    state = optimizer.inner.state
    leaves = next((own for stacked, own in optimizer.slices if stacked is parameter), None)
    first = state.get(parameter if leaves is None else leaves[0], {})
    for key, value in first.items():
        if key != "step" and isinstance(value, Tensor):
            yield value.unbind(0) if leaves is None else [state[leaf][key] for leaf in leaves]
