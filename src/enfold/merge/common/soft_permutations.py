"""Learning soft permutations: distinct members, groups that may be mixed, starts, stages and the objective."""

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
from enfold.errors import EnfoldError, level_outside
from enfold.merge.common.inputs import first_inputs
from enfold.merge.common.soft import SoftAverage
from enfold.merge.common.solve import REMEDY, condition
from enfold.merge.common.states import states_of, unaligned_reason, warn_unaligned
from enfold.seeds import generator
from enfold.symmetry import Group, Symmetry, match_weights, permute, symmetries
from enfold.train.objective import ByBatch, Objective, StepContext

Mixing = Literal["equal", "dirichlet"]


def all_equal(members: Ensemble) -> bool:
    """Return whether members are bitwise equal, including statistics and other buffers."""
    first, *others = states_of(members)
    return all(torch.equal(tensor, other[name]) for other in others for name, tensor in first.items())


def distinct_members(members: Ensemble) -> tuple[list[State], list[int]]:
    """Return the members that differ in at least one bit of a parameter, and how often each occurs."""
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


def find_mixable(members: Ensemble, data: Data, seed: int, *, matched: bool = False) -> tuple[Ensemble, Symmetry]:
    """Return the members and the groups of their units that may be mixed, with a warning if some may not.

    Only permutations preserve the two uses of a tied weight. If `matched`, the units that it produces and consumes are
    put in the first member's order by weight matching; otherwise they are not aligned.

    Args:
        members: The members.
        data: The data.
        seed: The seed.
        matched: Whether units of tied weights are put in the first member's order by weight matching.
    """
    with torch.random.fork_rng(devices=[]):  # a loader may use the global generator
        network = members.member(0)
        found = symmetries(network, first_inputs(data, "perm_avg"), seed=seed, logits_only=True)
    tied = [group for group in found.groups if any(axis.role == "both" for axis in group.axes)]
    soft = tuple(group for group in found.groups if group not in tied)
    _require_solvable(soft, states_of(members)[0])
    reason = unaligned_reason(network, found)
    if tied and matched:
        members = _match_groups(members, found, tied, seed)
    elif tied:
        reason = reason or f"tied weights produce and consume those of {', '.join(group.name for group in tied)}"
    if reason or not found.groups:
        what = "some units are" if soft or (tied and matched) else "no unit is aligned, and all are"
        warn_unaligned(what, reason or "none is free")
    return members, replace(found, groups=soft)


def _match_groups(members: Ensemble, symmetry: Symmetry, groups: Sequence[Group], seed: int) -> DeepEnsemble:
    """Return the members with the units of these groups matched to the first member's."""
    learned, names = set(members.skeleton.parameters), {group.name for group in groups}
    first, *others = states_of(members)
    states = [first]
    for state in others:
        orders = match_weights(first, state, symmetry, seed=seed, learned=learned)
        states.append(permute(state, symmetry, {name: order for name, order in orders.items() if name in names}))
    return DeepEnsemble([members.network(state) for state in states], engine=members.engine)


def _require_solvable(groups: Sequence[Group], state: State) -> None:
    kinds = {state[axis.name].dtype for group in groups for axis in group.axes if axis.name in state}
    for kind in kinds - {torch.float32, torch.float64}:
        raise EnfoldError(
            f"perm_avg inverts matrices, which needs members in float32 or float64, got {kind}: use "
            f"{'enfold.merge.weight_matching' if kind.is_complex else 'members.float()'}"
        )


def identity_matrices(symmetry: Symmetry, number: int, like: Tensor) -> list[Tensor]:
    """Return identity matrices for each group, (number, d, d)."""
    return [torch.eye(group.size).to(like).repeat(number, 1, 1) for group in symmetry.groups]


def random_matrices(symmetry: Symmetry, members: Sequence[int], seed: int, like: Tensor) -> list[Tensor]:
    """Return matrices of standard normal entries for each group, (members, d, d), drawn for each member on its own.

    Args:
        symmetry: The groups of permutable axes.
        members: Indices of members, which choose their random numbers.
        seed: Seed.
        like: A tensor of the wanted type and device.
    """
    return [
        torch.stack(
            [
                torch.randn(group.size, group.size, generator=generator(seed, "scores", index, member))
                for member in members
            ]
        ).to(like)
        for index, group in enumerate(symmetry.groups)
    ]


def matching_matrices(
    target: State, states: Sequence[State], symmetry: Symmetry, learned: set[str], seed: int, like: Tensor
) -> list[Tensor]:
    """Return the permutations that match each state to the target, (states, d, d) for each group.

    Args:
        target: The state to match.
        states: The states.
        symmetry: The groups of units.
        learned: The names of the tensors that are compared.
        seed: The seed.
        like: A tensor with the data type and device of the result.
    """
    orders = [match_weights(target, state, symmetry, seed=seed, learned=learned) for state in states]
    return [
        torch.stack([torch.eye(group.size)[own[group.name]] for own in orders]).to(like) for group in symmetry.groups
    ]


@dataclass(frozen=True)
class AnnealedObjective:
    """An objective that sets the temperature and the mixing weights of every step.

    Args:
        inner: The loss.
        options: The options of the method, for the identity of a checkpoint.
        num_members: Number of members that are averaged.
        temperatures: τ at the start and at the end.
        mixing: Weights of the members in a step.
    """

    inner: Objective
    options: str
    num_members: int
    temperatures: tuple[float, float]
    mixing: Mixing = "equal"

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, (1,)."""
        return self.inner(model, batch)

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext) -> Objective:
        """Return the loss of one step.

        Args:
            model: The model.
            batch: The batch.
            context: The position in the training.
        """
        if isinstance(model, SoftAverage):
            start, end = self.temperatures
            model.get_buffer("temperature").fill_(start * (end / start) ** context.progress)
            if self.mixing == "dirichlet":
                draws = -torch.rand(
                    self.num_members, generator=generator(context.seed, "mixing"), dtype=torch.float64
                ).log()
                model.drawn = (draws / draws.sum()).tolist()
        return self.inner.for_batch(model, batch, context) if isinstance(self.inner, ByBatch) else self.inner


def warn_if_singular(model: SoftAverage) -> None:
    """Warn if a matrix is so ill-conditioned that its inverse has few correct digits."""
    worst = max(float(condition(each).max()) for each in model.all_matrices())
    if worst > 0.01 / torch.finfo(model.scores[0].dtype).eps:
        warnings.warn(
            f"soft permutations should be well conditioned, but one has a condition number of {worst:.0e}, so that its "
            f"inverse has few correct digits: {REMEDY}",
            stacklevel=level_outside(),
        )
