"""WASH: members are trained together and swap a few weights in every step, so that they can be averaged.

    for each scalar weight i of layer l, with probability p_l:   θ_m[i] <- θ_π(m)[i],   π drawn for i  (1)
    p_l = p (1 - l / (L - 1)),     l = 0 .. L - 1                                                      (2)

L. Fournier, A. Nabli, M. Aminbeidokhti, M. Pedersoli, E. Belilovsky, E. Oyallon: WASH: Train your Ensemble with
Communication-Efficient Weight Shuffling, then Average, arXiv:2405.17517.

Training holds M networks; the result is their average, `enfold.merge.average(ensemble, train)`. A shuffle changes
neither the mean nor the variance of a weight over members. Layers are the modules that own trainable parameters, in the
order of `named_modules`; the last is not shuffled (schedule="constant" gives p to all). With `optimizer_state` the
optimizer's moments of a weight are swapped with it (WASH+Opt). Running statistics are not swapped. The permutations
depend on the seed and the step. The last epoch is used, as members depend on each other.

Differs from the paper: its code was not available, so the count of layers may differ, and p = 0.001 is meant for
trainings of many thousand steps; trainings of some hundred steps need 0.01 to 0.05. Members start as copies of the
network; with start="own" every member has its own initialisation, and swapped weights have little in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.options import Fraction
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.ensembles.papa import Start, make_population, train_to_last_epoch
from enfold.seeds import generator
from enfold.train import TrainConfig
from enfold.train.optimize import Optimizer


@checked
class WASH(DeepEnsemble):
    """Members that are trained together and swap a few weights in every step.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        probability: p: the probability of a weight to be swapped in a step.
        schedule: "decreasing": p decreases to 0 at the last layer, (2); "constant": it is the same for all layers.
        optimizer_state: WASH+Opt: the optimizer's moments of a weight are swapped with it.
        start: Members start as copies of the network, or each with its own initialisation ("own").
        seed: The seed of initialisations and permutations.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        probability: Fraction = 0.001,
        schedule: Literal["decreasing", "constant"] = "decreasing",
        optimizer_state: bool = False,
        start: Start = "network",
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        super().__init__(make_population(network, num_members, start, seed), engine=engine)
        self.probability, self.schedule, self.optimizer_state = probability, schedule, optimizer_state
        self.start, self.seed = start, seed

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train all members to the last epoch."""
        return train_to_last_epoch(config)

    def probabilities(self) -> dict[str, float]:
        """Return p_l of every trainable parameter."""
        names = [name for name in self.skeleton.parameters if name in self.skeleton.trainable]
        layers = {name: name.rpartition(".")[0] for name in names}
        depth = {layer: index for index, layer in enumerate(dict.fromkeys(layers.values()))}
        if self.schedule == "constant" or len(depth) == 1:
            return dict.fromkeys(names, self.probability)
        return {name: self.probability * (1 - depth[layers[name]] / (len(depth) - 1)) for name in names}  # (2)

    @torch.no_grad()
    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Shuffle weights between members, (1)."""
        if self.num_members < 2:
            return
        source = generator(self.seed, "wash", step)
        stored = self.tree.state()
        for name, probability in self.probabilities().items():
            values = stored[name]
            swapped = torch.rand(values.shape[1:], generator=source) < probability
            order = torch.rand(self.num_members, int(swapped.sum()), generator=source).argsort(dim=0)  # (M, swapped)
            if not order.numel():
                continue
            swapped, order = swapped.to(values.device), order.to(values.device)
            shuffle(values.unbind(0), swapped, order)
            if self.optimizer_state:
                for moments in optimizer_moments(optimizer, values):
                    shuffle(moments, swapped, order)


def shuffle(members: Sequence[Tensor], swapped: Tensor, order: Tensor) -> None:
    """Set member m to the values of member order[m] wherever `swapped` is true, in place."""
    values = torch.stack([member[swapped] for member in members]).gather(0, order)  # (1), (M, swapped)
    for member, new in zip(members, values, strict=True):
        member[swapped] = new


def optimizer_moments(optimizer: Optimizer, parameter: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield the optimizer's state of a stacked parameter, each as M tensors of one member's shape."""
    state = optimizer.inner.state
    leaves = next((own for stacked, own in optimizer.slices if stacked is parameter), None)
    first = state.get(parameter if leaves is None else leaves[0], {})
    for key, value in first.items():
        if key != "step" and isinstance(value, Tensor):
            yield value.unbind(0) if leaves is None else [state[leaf][key] for leaf in leaves]
