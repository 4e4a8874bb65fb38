"""Straight-through matching: permutations are learned by the loss half-way between two members, by a free network.

    π = argmax over permutations <θ̃, π(θ_m)>      θ̃: free parameters, at first θ_r                               (1)
    L(½ (θ_r + π(θ_m)))                            loss of the mid-point on training data                         (2)
    θ̃ ← θ̃ - η ∂L/∂π(θ_m)                          as if (1) were the identity: straight through                  (3)
    θ̄ = (1/M) Σ_m π_m(θ_m)                         with the π_m of the lowest loss (2) of an epoch                (4)

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836, section 3.3.

What (1) finds at first is weight matching; the loss (2) may then be lowered, never raised, on the training part. It is
slow: a matching at every step.

Differs from the paper: more than two members are each matched to the reference; a matching is computed in full instead
of being continued from the last one; matching ends early when an epoch's loss has not fallen for `patience` epochs;
members that differ by nothing but an order are not trained; batch norms use each batch's own statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.content import content
from enfold.data.dataset import class_labels
from enfold.engines.modes import evaluating
from enfold.engines.outputs import at_least_float32, require_classes
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.io.files import digest, part_file
from enfold.merge.common.base import Alignment
from enfold.merge.common.states import require_reference
from enfold.seeds import derive
from enfold.symmetry import Symmetry, matched_to
from enfold.train import TrainConfig
from enfold.train.batch_norm import TRACKING, several_examples
from enfold.train.descent import Descent


@dataclass(frozen=True)
class StraightThrough(Alignment):
    """The mean of the members in the orders in which the mid-points to one member have the lowest loss."""

    reference: int = 0  # the member whose order the others are put in
    epochs: int = 250  # at most
    patience: int = 10  # stop after so many epochs without a lower loss
    lr: float = 1e-2  # of SGD
    momentum: float = 0.9  # of SGD
    batch_size: int = 1000  # examples a step

    purpose: ClassVar[str] = "straight-through matching"
    least: ClassVar[dict[str, float]] = {"reference": 0, "momentum": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0 or self.patience < 1 or self.batch_size < 2 or not 0 < self.lr < math.inf:
            raise EnfoldError(
                "straight-through matching needs epochs of 0 or more, patience of 1 or more, a batch_size of 2 or more "
                f"and a lr above 0, got {self.epochs}, {self.patience}, {self.batch_size} and "
                f"{self.lr}: 250, 10, 1000 and 0.01 are usual"
            )

    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """Each member in the order of equation (4)."""
        fixed = states[require_reference(self.reference, len(states))]
        moved = [index for index, state in enumerate(states) if state is not fixed]
        files = {index: checkpoint and part_file(checkpoint, index) for index in moved[:-1]} | {moved[-1]: checkpoint}
        found = list(states)
        with evaluating(members.skeleton.network), _own_statistics(members), several_examples():
            for index, file in files.items():
                found[index] = _Pair(self, fixed, states[index], symmetry, members, data).learned(index, file)
        for file in list(files.values())[:-1]:
            if file is not None:
                file.unlink(missing_ok=True)
        return found


@dataclass(frozen=True)
class _Pair:
    """A member whose order is learned, and the reference."""

    fold: StraightThrough
    fixed: State
    state: State
    symmetry: Symmetry
    members: Ensemble
    data: Data

    def learned(self, index: int, file: Path | None) -> State:
        """The member of that number in its order; what is needed to go on is written after every epoch."""
        free = nn.ParameterList([self.fixed[name].clone() for name in self.names])
        first = self.matched(free)
        if all(torch.equal(first[name], self.fixed[name]) for name in self.names):
            return first
        settings = self.fold
        plan = TrainConfig(settings.epochs, settings.batch_size, "sgd", settings.lr, settings.momentum)
        plan = plan.replace(nesterov=False, weight_decay=0.0, patience=settings.patience)
        values = digest((*self.fixed.values(), *self.state.values()))
        known = {"settings": asdict(settings), "member": index, "members' weights": values}
        identity = {**known, **content(self.data, ("train",))}
        descent = Descent(free, plan, identity, file)
        steps = Order(settings.batch_size).steps(self.data.train)
        told = f"member {index}: "
        for epoch in descent.epochs(lambda: self.loss(self.matched(free)), steps, "straight_through", told):
            for batch in self.batches(epoch):
                slopes = _slopes(self.fixed, self.matched(free), self.members, batch.inputs, batch.labels)
                descent.step(slopes)  # (3)
        return self.matched(free)

    @property
    def names(self) -> list[str]:
        """What is learned."""
        return list(self.members.skeleton.parameters)

    def matched(self, free: Iterable[Tensor]) -> State:
        """Equation (1)."""
        goal = {**self.fixed, **{name: tensor.detach() for name, tensor in zip(self.names, free, strict=True)}}
        return matched_to(goal, self.state, self.symmetry, seed=self.fold.seed, learned=set(self.names))

    def loss(self, moved: State) -> float:
        """The mean of equation (2) over the training part."""
        total, count = 0.0, 0
        for batch in self.batches(epoch=0):
            loss = _midpoint_loss(_midpoint(self.fixed, moved), self.members, batch.inputs, batch.labels)
            total, count = total + float(loss) * len(batch.labels), count + len(batch.labels)
        return total / count

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The training part, in the same order whenever that epoch is asked for."""
        torch.manual_seed(derive(self.fold.seed, "loader", epoch))  # what a loader of the user's own shuffles by
        return Order(self.fold.batch_size, seed=self.fold.seed).batches(self.data, epoch)


def _midpoint(one: State, other: State) -> State:
    return {
        name: (tensor + other[name]) / 2 if tensor.is_floating_point() else tensor.clone()
        for name, tensor in one.items()
    }


def _slopes(fixed: State, moved: State, members: Ensemble, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """∂L/∂π(θ_m) of equation (2), half of the slope at the mid-point."""
    state = _midpoint(fixed, moved)
    leaves = [state[name].requires_grad_() for name in members.skeleton.parameters]
    with torch.enable_grad():
        loss = _midpoint_loss(state, members, inputs, labels)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if s is None else s / 2 for leaf, s in zip(leaves, slopes, strict=True)]


def _midpoint_loss(state: State, members: Ensemble, inputs: Tensor, labels: Tensor) -> Tensor:
    device = next(iter(state.values())).device
    with members.skeleton.holding(state) as network:
        logits = require_classes(member_logits(network, inputs.to(device)), "straight-through estimation")[0]
    classes = class_labels(labels, logits.shape[-1], "the training part")
    return F.cross_entropy(at_least_float32(logits), classes.to(device))


@contextmanager
def _own_statistics(members: Ensemble) -> Iterator[None]:
    """Norms take each batch's own statistics: those of two members do not fit their mid-point."""
    for layer in members.skeleton.network.modules():
        if isinstance(layer, TRACKING):
            layer.training = True
    yield
