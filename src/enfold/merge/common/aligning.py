"""What learning soft permutations needs around it: distinct members, groups, starts, steps, and a look at the end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge.common.soft import SoftAverage
from enfold.merge.common.solve import REMEDY, condition
from enfold.merge.common.states import example_of, say_unaligned, states_of, why_unaligned
from enfold.seeds import generator
from enfold.symmetry import Group, Symmetry, permute, symmetries, weight_matching
from enfold.train.objective import ByBatch, Objective, StepContext

Mixing = Literal["equal", "dirichlet"]


def all_equal(members: Ensemble) -> bool:
    """Whether members are the same to the last bit, statistics and other buffers too."""
    first, *others = states_of(members)
    return all(torch.equal(tensor, other[name]) for other in others for name, tensor in first.items())


def distinct(members: Ensemble) -> tuple[list[State], list[int]]:
    """Members that differ in at least one bit of a parameter, and how often each is there."""
    states: list[State] = []
    counts: list[int] = []
    names = list(members.skeleton.parameters)
    for state in states_of(members):
        same = (k for k, known in enumerate(states) if all(torch.equal(known[name], state[name]) for name in names))
        index = next(same, None)
        if index is None:
            states.append(state)
            counts.append(1)
        else:
            counts[index] += 1
    return states, counts


def mixable(members: Ensemble, data: Data, seed: int, *, matched: bool = False) -> tuple[Ensemble, Symmetry]:
    """The members, and the groups of their units that may be mixed; a warning tells of units that may not.

    No matrix but a permutation keeps the two uses of a tied weight together. If `matched`, the units that it makes and
    takes are put in the first member's order by weight matching; else they stay as they are.
    """
    with torch.random.fork_rng(devices=[]):  # a loader of the user's own may draw
        network = members.member(0)
        found = symmetries(network, example_of(data), seed=seed, logits_only=True)
    tied = [group for group in found.groups if any(axis.role == "both" for axis in group.axes)]
    soft = tuple(group for group in found.groups if group not in tied)
    _require_solvable(soft, states_of(members)[0])
    reason = why_unaligned(network, found)
    if tied and matched:
        members = _in_order(members, found, tied, seed)
    elif tied:
        reason = reason or f"tied weights make and take those of {', '.join(group.name for group in tied)}"
    if reason or not found.groups:
        what = "some units are" if soft or (tied and matched) else "no unit is aligned, and all are"
        say_unaligned(what, reason or "none is free")
    return members, replace(found, groups=soft)


def _in_order(members: Ensemble, symmetry: Symmetry, groups: Sequence[Group], seed: int) -> DeepEnsemble:
    """The members with the units of these groups in the orders that are nearest to the first one's."""
    learned, names = set(members.skeleton.parameters), {group.name for group in groups}
    first, *others = states_of(members)
    states = [first]
    for state in others:
        orders = weight_matching(first, state, symmetry, seed=seed, learned=learned)
        states.append(permute(state, symmetry, {name: order for name, order in orders.items() if name in names}))
    return DeepEnsemble([members.network(state) for state in states], engine=members.engine)


def _require_solvable(groups: Sequence[Group], state: State) -> None:
    kinds = {state[axis.name].dtype for group in groups for axis in group.axes if axis.name in state}
    for kind in kinds - {torch.float32, torch.float64}:
        raise EnfoldError(
            f"soft permutations are inverted, which takes members in float32 or float64, got {kind}: use "
            f"{'weight_matching' if kind.is_complex else 'members.float()'}"
        )


def identities(symmetry: Symmetry, number: int, like: Tensor) -> list[Tensor]:
    """So many identity matrices for each group, (number, d, d)."""
    return [torch.eye(group.size).to(like).repeat(number, 1, 1) for group in symmetry.groups]


def matchings(
    target: State, states: Sequence[State], symmetry: Symmetry, learned: set[str], seed: int, like: Tensor
) -> list[Tensor]:
    """The permutations that bring each state nearest to the target, (states, d, d) for each group."""
    orders = [weight_matching(target, state, symmetry, seed=seed, learned=learned) for state in states]
    return [
        torch.stack([torch.eye(group.size)[own[group.name]] for own in orders]).to(like) for group in symmetry.groups
    ]


@dataclass(frozen=True)
class Steps:
    """A loss, after the temperature and the weights of a step are set; a checkpoint belongs to one fold and stage."""

    inner: Objective
    fold: str  # what the fold is, and of which members, for the checkpoint
    stage: int  # members that are averaged
    temperatures: tuple[float, float]  # at the start and at the end
    mixing: Mixing = "equal"

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss, (1,)."""
        return self.inner(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, moment: StepContext) -> Objective:
        """The loss of one step."""
        if isinstance(model, SoftAverage):
            start, end = self.temperatures
            model.get_buffer("temperature").fill_(start * (end / start) ** moment.progress)
            if self.mixing == "dirichlet":
                draws = -torch.rand(self.stage, generator=generator(moment.seed, "mixing"), dtype=torch.float64).log()
                model.drawn = (draws / draws.sum()).tolist()
        return self.inner.for_batch(model, batch, moment) if isinstance(self.inner, ByBatch) else self.inner


def watch(model: SoftAverage) -> None:
    """Warn where a matrix is so near to a singular one that its inverse is right to few digits."""
    worst = max(float(condition(each).max()) for each in model.all_matrices())
    if worst > 0.01 / torch.finfo(model.scores[0].dtype).eps:
        warnings.warn(
            f"soft permutations should be well conditioned, but one has a condition number of {worst:.0e}, so that its "
            f"inverse is right to few digits: {REMEDY}",
            stacklevel=4,
        )
