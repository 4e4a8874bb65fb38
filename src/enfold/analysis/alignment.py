"""Statistics of soft permutations: weights before and after alignment, softness, and averages of weights.

    distance     mean over rows i of  ‖w_i^(1) - w_i^(2)‖                                     (1)
    deviation    mean over weights of the deviation over members (population)          (2)
    correlation  mean over rows i of Pearson's r of w_i^(1) and w_i^(2)                       (3)
    softness     (1/d) Σ_i -Σ_j P_ij ln P_ij / ln d:  0 for a permutation, 1 if uniform       (4)

A row contains all weights of a layer that enter one of its outputs. "Before" are the trained members, "after" is
P_l W_l P_(l-1)^-1. With more than two members, (1) and (3) are means over all pairs. A soft permutation averages rows,
which makes them shorter and closer to each other: compare (1) and (2) with the norms of the rows, which are given too.
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

from enfold.analysis.states import require_classes
from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge.common.permutation_learning import PermutationOptions, find_groups, learn_permutations
from enfold.merge.common.sinkhorn import softness
from enfold.merge.common.soft import mix_units
from enfold.merge.common.soft_permutations import distinct_members
from enfold.merge.common.solve import Inverse, Singular, condition
from enfold.merge.common.states import mean_of, states_of
from enfold.metrics import accuracy, mean_member, nll
from enfold.progress import replace_titles
from enfold.symmetry import Group
from enfold.train.batch_norm import reestimate

TEMPERATURES = (0.1, 0.5, 1.0, 5.0, 10.0)


@dataclass(frozen=True)
class Aligned:
    """Members and the matrices that align all but the first to the first."""

    members: Ensemble
    groups: tuple[Group, ...]
    matrices: list[Tensor]  # (M - 1, d, d) for each group
    inverse: Inverse = "exact"  # what stands for the inverse of a matrix

    def states(self) -> list[State]:
        """Return the members after alignment; the first is unchanged."""
        first, *others = states_of(self.members)
        moved = (mix_units(state, self.groups, self._of(index), self.inverse) for index, state in enumerate(others))
        return [first, *moved]

    def _of(self, index: int) -> list[Tensor]:
        return [each[index] for each in self.matrices]


@dataclass(frozen=True)
class Scores:
    """Scores of one network on test data."""

    accuracy: float
    nll: float


@dataclass(frozen=True)
class Change:
    """A quantity before and after alignment."""

    before: float
    after: float


@dataclass(frozen=True)
class Rows:
    """Equations (1) to (3) of one layer."""

    layer: str
    units: int  # rows
    hidden: bool  # whether its rows are permuted, or only its inputs, as for the output layer
    distance: Change
    deviation: Change
    correlation: Change
    length: Change  # mean norm of a row


@dataclass(frozen=True)
class Matrices:
    """Statistics of the soft permutations of one group of units, one value per aligned member."""

    group: str
    units: int
    softness: list[float]  # (4)
    condition: list[float]  # largest over smallest singular value
    one_to_one: list[float]  # fraction of units that are the largest entry of some row


@dataclass(frozen=True)
class SweepPoint:
    """The result of one temperature; if its matrices became singular, only `failed` is set."""

    temperature: float
    accuracy: float | None = None
    nll: float | None = None
    softness: dict[str, float] | None = None  # mean over members, by group
    failed: str | None = None


def check_soft(options: PermutationOptions) -> None:
    """Raise an error if permAVG does more than align members to the first by soft permutations."""
    beyond = [name for name in ("universe", "gain") if getattr(options, name)]
    if beyond:
        raise EnfoldError(
            f"the analysis supports soft permutations to the first member only, got permAVG with {', '.join(beyond)}: "
            "omit these options"
        )


def train_alignment(
    members: Ensemble, data: Data, options: PermutationOptions, *, checkpoint: Path | None = None
) -> Aligned:
    """Train permAVG and return the members with its soft permutations; resumes from `checkpoint`.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        checkpoint: File of the training checkpoint, from which an interrupted training continues.
    """
    check_soft(options)
    if len(distinct_members(members)[0]) < max(members.num_members, 2):
        raise EnfoldError(
            f"members must contain at least 2 different networks, got {members.num_members} of which "
            f"{len(distinct_members(members)[0])} differ: choose others"
        )
    members, symmetry = find_groups(members, data, options)
    model = learn_permutations(members, data, symmetry, options, checkpoint=checkpoint)
    if model is None:
        raise EnfoldError(
            f"alignment needs hidden units that may be permuted, but {type(members.skeleton.network).__name__} has "
            "none: print symmetries(network, example) to see why"
        )
    return Aligned(members, model.groups, [each.cpu() for each in model.all_matrices()], options.inverse)


def restore_alignment(
    members: Ensemble, data: Data, options: PermutationOptions, matrices: Sequence[Tensor]
) -> Aligned:
    """Return the members with given matrices, in the order of the groups.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        matrices: The soft permutations, one (members - 1, d, d) for each group.
    """
    members, symmetry = find_groups(members, data, options)
    groups = symmetry.groups
    expected = [(members.num_members - 1, group.size, group.size) for group in groups]
    if [tuple(each.shape) for each in matrices] != expected:
        raise EnfoldError(
            f"matrices must have the shapes {expected}, one per group, got "
            f"{[tuple(each.shape) for each in matrices]}: train them again"
        )
    return Aligned(members, groups, list(matrices), options.inverse)


@torch.no_grad()
def compute_row_statistics(before: Sequence[State], after: Sequence[State], groups: Sequence[Group]) -> list[Rows]:
    """Return equations (1) to (3) of every permuted layer, in the order of the network.

    Args:
        before: State dicts of the members before the alignment.
        after: State dicts after it.
        groups: Permutation groups of the network.
    """
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
    """Return name, row axis, rows and whether they are hidden, for weights of two or more axes."""
    axes = [axis for group in groups for axis in group.axes if not axis.tied_to]
    found = []
    for name, tensor in state.items():
        own = [axis for axis in axes if axis.name == name]
        if not own or tensor.ndim < 2 or max(tensor.shape) == tensor.numel():  # rows of a single weight
            continue
        made = [axis for axis in own if axis.role in ("produces", "meets")]
        if made:
            output = min(axis.axis for axis in made)
            ranges = [range(axis.offset, axis.offset + axis.length) for axis in made if axis.axis == output]
            found.append((name, output, sorted(set().union(*ranges)), True))
        else:  # the output layer: its rows are classes, which are not permuted
            free = next(iter(sorted(set(range(tensor.ndim)) - {axis.axis for axis in own})), None)
            if free is not None:
                found.append((name, free, list(range(tensor.shape[free])), False))
    return found


def _distance(rows: Tensor) -> float:
    """Return equation (1), (M, d, n) -> mean over pairs."""
    return _over_pairs(rows, lambda one, other: (one - other).norm(dim=1).mean())


def _deviation(rows: Tensor) -> float:
    """Return equation (2)."""
    return float(rows.std(0, correction=0).mean())


def _correlation(rows: Tensor) -> float:
    """Return equation (3), mean over pairs."""
    return _over_pairs(rows, lambda one, other: _pearson(one, other).mean())


def _length(rows: Tensor) -> float:
    return float(rows.norm(dim=2).mean())


def _over_pairs(rows: Tensor, measure: Callable[[Tensor, Tensor], Tensor]) -> float:
    pairs = list(combinations(range(len(rows)), 2))
    return sum(float(measure(rows[one], rows[other])) for one, other in pairs) / len(pairs)


def _pearson(one: Tensor, other: Tensor) -> Tensor:
    """Return the correlation of each row, (d,); that of a constant row is 1 with an equal row, else 0."""
    centred = [each - each.mean(1, keepdim=True) for each in (one, other)]
    sizes = [each.norm(dim=1) for each in centred]
    product = sizes[0] * sizes[1]
    flat = product <= torch.finfo(one.dtype).eps * one.norm(dim=1) * other.norm(dim=1)
    same = (one == other).all(1).to(one)
    return torch.where(flat, same, (centred[0] * centred[1]).sum(1) / product.where(~flat, 1.0))


@torch.no_grad()
def compute_matrix_statistics(groups: Sequence[Group], matrices: Sequence[Tensor]) -> list[Matrices]:
    """Return softness, condition number and fraction of one-to-one units for the matrices (M - 1, d, d).

    Args:
        groups: Permutation groups of the network.
        matrices: For each group, the matrices of all members but the first.
    """
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
def score_average(members: Ensemble, states: Sequence[State], data: Data) -> Scores:
    """Return the scores of the mean of states, with batch-norm statistics estimated again.

    Args:
        members: The ensemble whose architecture the states have.
        states: State dicts of the networks.
        data: Data set: training inputs for the statistics, test examples for the scores.
    """
    network = members.network(mean_of(states)).eval()
    reestimate(network, data)
    predictions = require_classes(predict(network, data.test, task=members.task), "score_average")
    return Scores(accuracy(predictions), nll(predictions))


def score_mean_member(members: Ensemble, data: Data) -> Scores:
    """Return the scores of the mean member on test data."""
    predictions = require_classes(predict(members, data.test), "score_mean_member")
    return Scores(mean_member(accuracy, predictions), mean_member(nll, predictions))


def score_naive_averages(members: Ensemble, data: Data) -> dict[int, Scores]:
    """Return the scores of the average of the first k members for k from 2 to M, and of the mean member under 1."""
    states = states_of(members)
    averages = {k: score_average(members, states[:k], data) for k in range(2, len(states) + 1)}
    return {1: score_mean_member(members, data), **averages}


def train_at_temperature(members: Ensemble, data: Data, options: PermutationOptions, temperature: float) -> SweepPoint:
    """Train permAVG at one temperature and return the result.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        temperature: The temperature of the soft permutations.
    """
    try:
        # the sweep includes ill-conditioned matrices on purpose
        with warnings.catch_warnings(action="ignore"), replace_titles(f"permAVG at temperature {temperature:g}"):
            return score_temperature(
                train_alignment(members, data, replace(options, temperature=temperature)), data, temperature
            )
    except Singular as error:
        return SweepPoint(temperature, failed=str(error))


def score_temperature(aligned: Aligned, data: Data, temperature: float) -> SweepPoint:
    """Return the scores and the softness of an alignment."""
    scores = score_average(aligned.members, aligned.states(), data)
    found = compute_matrix_statistics(aligned.groups, aligned.matrices)
    soft = {each.group: sum(each.softness) / len(each.softness) for each in found}
    return SweepPoint(temperature, scores.accuracy, scores.nll, soft)


def sweep_temperatures(
    members: Ensemble, data: Data, options: PermutationOptions, temperatures: Sequence[float] = TEMPERATURES
) -> list[SweepPoint]:
    """Train permAVG at each temperature and return accuracy, NLL and softness.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        temperatures: The temperatures.
    """
    return [train_at_temperature(members, data, options, temperature) for temperature in temperatures]


def to_json(found: Any) -> Any:
    """Return dataclasses, also inside lists and dictionaries, as JSON values."""
    if isinstance(found, dict):
        return {str(key): to_json(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [to_json(each) for each in found]
    return asdict(found) if hasattr(found, "__dataclass_fields__") else found
