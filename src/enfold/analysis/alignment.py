"""Alignment: what soft permutations do to members' weights, how soft they are, and what averaging gives with them.

    distance     mean over rows i of  ‖w_i^(1) - w_i^(2)‖                                     (1)
    deviation    mean over weights of the deviation over members (of the population)          (2)
    correlation  mean over rows i of Pearson's r of w_i^(1) and w_i^(2)                       (3)
    softness     (1/d) Σ_i -Σ_j P_ij ln P_ij / ln d:  0 for a permutation, 1 if uniform       (4)

A row is all weights of a layer that come into one of its outputs, each place of a head or gate for itself. "Before" is
as members were trained, "after" is P_l W_l P_(l-1)^-1. With more than two members, (1) and (3) are means over all
pairs. A soft permutation averages rows, which makes them shorter and so nearer to each other whether they agree or not:
read (1) and (2) beside the rows' lengths, which are given too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge.common.permutation_learning import PermutationOptions, find_groups, learn_permutations
from enfold.merge.common.sinkhorn import softness
from enfold.merge.common.soft import mix_units
from enfold.merge.common.soft_permutations import distinct_members
from enfold.merge.common.solve import Singular, condition
from enfold.merge.common.states import mean_of, states_of
from enfold.metrics import accuracy, mean_member, nll
from enfold.progress import titled
from enfold.symmetry import Group
from enfold.train.batch_norm import reestimate

TEMPERATURES = (0.1, 0.5, 1.0, 5.0, 10.0)


@dataclass(frozen=True)
class Aligned:
    """Members and the matrices that align all but the first of them."""

    members: Ensemble
    groups: tuple[Group, ...]
    matrices: list[Tensor]  # (M - 1, d, d) for each group

    def states(self) -> list[State]:
        """The members after alignment, the first as it is."""
        first, *others = states_of(self.members)
        return [first, *(mix_units(state, self.groups, self._of(index)) for index, state in enumerate(others))]

    def _of(self, index: int) -> list[Tensor]:
        return [each[index] for each in self.matrices]


@dataclass(frozen=True)
class Scores:
    """One network on test data."""

    accuracy: float
    nll: float


@dataclass(frozen=True)
class Change:
    """A quantity as it was and as it is after alignment."""

    before: float
    after: float


@dataclass(frozen=True)
class Rows:
    """Equations (1) to (3) of one layer."""

    layer: str
    units: int  # rows
    hidden: bool  # whether its rows are aligned themselves, or only what they take in, as of the output layer
    distance: Change
    deviation: Change
    correlation: Change
    length: Change  # mean norm of a row


@dataclass(frozen=True)
class Matrices:
    """The soft permutations of one group of units, a value for each member that is aligned."""

    group: str
    units: int
    softness: list[float]  # (4)
    condition: list[float]  # largest over smallest singular value
    one_to_one: list[float]  # share of units that are the largest entry of some row


@dataclass(frozen=True)
class SweepPoint:
    """What one temperature gives; where its matrices became singular, `failed` says so and there is nothing else."""

    temperature: float
    accuracy: float | None = None
    nll: float | None = None
    softness: dict[str, float] | None = None  # mean over members, by group
    failed: str | None = None


def require_soft(options: PermutationOptions) -> None:
    """Refuse a permAVG that does more than bring members to the first one by soft permutations."""
    beyond = [name for name in ("universe", "gain") if getattr(options, name)]
    if beyond:
        raise EnfoldError(
            f"alignment is that of soft permutations to the first member, got permAVG with {', '.join(beyond)}: leave "
            "that out"
        )


def learned_alignment(
    members: Ensemble, data: Data, options: PermutationOptions, *, checkpoint: Path | None = None
) -> Aligned:
    """The members with the soft permutations that permAVG learns; training goes on from `checkpoint`."""
    require_soft(options)
    if len(distinct_members(members)[0]) < max(members.num_members, 2):
        raise EnfoldError(
            f"alignment needs 2 or more members that differ, got {members.num_members} of which "
            f"{len(distinct_members(members)[0])} differ: choose others"
        )
    members, symmetry = find_groups(members, data, options)
    model = learn_permutations(members, data, symmetry, options, checkpoint=checkpoint)
    if model is None:
        raise EnfoldError(
            f"alignment needs hidden units that may be permuted, but {type(members.skeleton.network).__name__} has "
            "none that are known: print symmetries(network, example) to see why"
        )
    return Aligned(members, model.groups, [each.cpu() for each in model.all_matrices()])


def given_alignment(members: Ensemble, data: Data, options: PermutationOptions, matrices: Sequence[Tensor]) -> Aligned:
    """The members with matrices that such a permAVG learned before, in the order of the groups."""
    members, symmetry = find_groups(members, data, options)
    groups = symmetry.groups
    expected = [(members.num_members - 1, group.size, group.size) for group in groups]
    if [tuple(each.shape) for each in matrices] != expected:
        raise EnfoldError(
            f"there must be one matrix a group and aligned member, {expected} in all, got "
            f"{[tuple(each.shape) for each in matrices]}: learn them anew"
        )
    return Aligned(members, groups, list(matrices))


@torch.no_grad()
def row_statistics(before: Sequence[State], after: Sequence[State], groups: Sequence[Group]) -> list[Rows]:
    """Equations (1) to (3) of every layer that some group permutes, in the order of the network."""
    found = []
    for name, axis, places, hidden in _row_layers(before[0], groups):
        old, new = (
            torch.stack([state[name].detach().double().movedim(axis, 0)[places].flatten(1) for state in each])
            for each in (before, after)
        )
        changes = {
            what: Change(function(old), function(new))
            for what, function in (
                ("distance", _distance),
                ("deviation", _deviation),
                ("correlation", _correlation),
                ("length", _length),
            )
        }
        found.append(Rows(name.removesuffix(".weight"), old.shape[1], hidden, **changes))
    return found


def _row_layers(state: State, groups: Sequence[Group]) -> list[tuple[str, int, list[int], bool]]:
    """Weights of two axes or more that a group changes: the axis and places of their rows, and if these are hidden."""
    axes = [axis for group in groups for axis in group.axes if not axis.tied_to]
    found = []
    for name, tensor in state.items():
        own = [axis for axis in axes if axis.name == name]
        if not own or tensor.ndim < 2 or max(tensor.shape) == tensor.numel():  # a row of one weight tells nothing
            continue
        made = [axis for axis in own if axis.role in ("produces", "meets")]
        if made:
            output = min(axis.axis for axis in made)
            ranges = [range(axis.offset, axis.offset + axis.length) for axis in made if axis.axis == output]
            found.append((name, output, sorted(set().union(*ranges)), True))
        else:  # the output layer: its rows are classes, which stay in place
            free = next(iter(sorted(set(range(tensor.ndim)) - {axis.axis for axis in own})), None)
            if free is not None:
                found.append((name, free, list(range(tensor.shape[free])), False))
    return found


def _distance(rows: Tensor) -> float:
    """(M, d, n) -> equation (1), mean over pairs."""
    return _over_pairs(rows, lambda one, other: (one - other).norm(dim=1).mean())


def _deviation(rows: Tensor) -> float:
    """Equation (2)."""
    return float(rows.std(0, correction=0).mean())


def _correlation(rows: Tensor) -> float:
    """Equation (3), mean over pairs."""
    return _over_pairs(rows, lambda one, other: _pearson(one, other).mean())


def _length(rows: Tensor) -> float:
    return float(rows.norm(dim=2).mean())


def _over_pairs(rows: Tensor, measure: Callable[[Tensor, Tensor], Tensor]) -> float:
    pairs = list(combinations(range(len(rows)), 2))
    return sum(float(measure(rows[one], rows[other])) for one, other in pairs) / len(pairs)


def _pearson(one: Tensor, other: Tensor) -> Tensor:
    """Of each row, (d,); a row whose weights are all the same goes with none but an equal one."""
    centred = [each - each.mean(1, keepdim=True) for each in (one, other)]
    sizes = [each.norm(dim=1) for each in centred]
    product = sizes[0] * sizes[1]
    flat = product <= torch.finfo(one.dtype).eps * one.norm(dim=1) * other.norm(dim=1)
    same = (one == other).all(1).to(one)
    return torch.where(flat, same, (centred[0] * centred[1]).sum(1) / product.where(~flat, 1.0))


@torch.no_grad()
def matrix_statistics(groups: Sequence[Group], matrices: Sequence[Tensor]) -> list[Matrices]:
    """How soft the matrices of each group are, (M - 1, d, d), and how far from singular and from a permutation."""
    return [
        Matrices(
            group.name,
            group.size,
            softness(each).tolist(),  # (4)
            condition(each).tolist(),
            [len(matrix.argmax(1).unique()) / group.size for matrix in each],
        )
        for group, each in zip(groups, matrices, strict=True)
    ]


@torch.no_grad()
def average_scores(members: Ensemble, states: Sequence[State], data: Data) -> Scores:
    """The mean of states as a network on test data, with batch-norm statistics measured for it."""
    network = members.network(mean_of(states)).eval()
    reestimate(network, data)
    predictions = predict(network, data.test)
    return Scores(accuracy(predictions), nll(predictions))


def mean_scores(members: Ensemble, data: Data) -> Scores:
    """The mean member on test data."""
    said = predict(members, data.test)
    return Scores(mean_member(accuracy, said), mean_member(nll, said))


def naive_averages(members: Ensemble, data: Data) -> dict[int, Scores]:
    """The plain average of the first k members for k from 2 to M, and under 1 the mean member."""
    states = states_of(members)
    averages = {k: average_scores(members, states[:k], data) for k in range(2, len(states) + 1)}
    return {1: mean_scores(members, data), **averages}


def temperature_point(members: Ensemble, data: Data, options: PermutationOptions, temperature: float) -> SweepPoint:
    """permAVG learned anew at one temperature."""
    try:
        # ill-conditioned matrices are what a sweep is there to see
        with warnings.catch_warnings(action="ignore"), titled(f"permAVG at temperature {temperature:g}"):
            return point_of(
                learned_alignment(members, data, replace(options, temperature=temperature)), data, temperature
            )
    except Singular as error:
        return SweepPoint(temperature, failed=str(error))


def point_of(aligned: Aligned, data: Data, temperature: float) -> SweepPoint:
    """What an alignment, learned at that temperature, gives."""
    scores = average_scores(aligned.members, aligned.states(), data)
    found = matrix_statistics(aligned.groups, aligned.matrices)
    soft = {each.group: sum(each.softness) / len(each.softness) for each in found}
    return SweepPoint(temperature, scores.accuracy, scores.nll, soft)


def temperature_sweep(
    members: Ensemble, data: Data, options: PermutationOptions, temperatures: Sequence[float] = TEMPERATURES
) -> list[SweepPoint]:
    """permAVG learned anew at each temperature: accuracy, NLL and softness."""
    return [temperature_point(members, data, options, temperature) for temperature in temperatures]


def plain(found: Any) -> Any:
    """Dataclasses, in lists and dictionaries too, as what JSON can hold."""
    if isinstance(found, dict):
        return {str(key): plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(each) for each in found]
    return asdict(found) if hasattr(found, "__dataclass_fields__") else found
