"""Pairs of networks with a known alignment: a permuted copy, and networks trained on different tasks.

    θ_2 = Π(θ_1) + ν s ε,   ε ~ N(0, 1),   s the deviation of each tensor's values            (1)
    recovered = fraction of units i for which  argmax_j P_ij = Π^-1(i)                           (2)

In (1) the correct alignment is Π^-1, and ν is the noise level. For a pair trained on different classes or labels, no
alignment makes the functions equal: any gain comes from training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from enfold.analysis.alignment import (
    Rows,
    Scores,
    compute_matrix_statistics,
    compute_row_statistics,
    score_average,
    train_alignment,
)
from enfold.data import Data, Split
from enfold.engines.initialization import initialize_member
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge.common.permutation_learning import PermutationOptions
from enfold.merge.common.soft_permutations import find_mixable
from enfold.merge.common.solve import Singular
from enfold.merge.common.states import states_of
from enfold.metrics import accuracy
from enfold.progress import replace_titles
from enfold.seeds import generator
from enfold.symmetry import Symmetry, match_state, match_weights, permute
from enfold.symmetry.permute import invert_orders
from enfold.train import TrainConfig, fit

NOISES = (0.0, 1.0, 3.0, 10.0, 30.0)
Difference = Literal["classes", "labels"]
METHODS = ("permAVG", "permAVG, matched", "weight matching")
START = 12.0  # times the matching, for the second of them


@dataclass(frozen=True)
class Recovery:
    """The fraction of a planted permutation that was recovered; None if matrices became singular."""

    noise: float  # ν of equation (1)
    recovered: dict[str, float | None]  # (2), by method
    chance: float  # the expected value of a random order


@dataclass(frozen=True)
class DifferentPair:
    """Two members trained on different tasks, before and after alignment."""

    difference: Difference
    members: list[float]  # accuracy of each
    naive: Scores
    matched: Scores  # the average after weight matching
    learned: Scores  # the average after permAVG
    rows: list[Rows]
    softness: dict[str, float]  # by group


@torch.no_grad()
def make_planted_pair(
    members: Ensemble, data: Data, noise: float, *, seed: int = 0
) -> tuple[DeepEnsemble, Symmetry, dict[str, Tensor]]:
    """Return the pair (1) from the first member, its symmetry, and the inverse permutations by group.

    Args:
        members: The members.
        data: The data.
        noise: The noise, in standard deviations of the weights.
        seed: The seed.
    """
    _, symmetry = find_mixable(members, data, seed)
    source = generator(seed, "plant")
    first = states_of(members)[0]
    orders = {group.name: torch.randperm(group.size, generator=source) for group in symmetry.groups}
    learned = set(members.skeleton.parameters)
    second: State = {}
    for name, tensor in permute(first, symmetry, orders).items():
        blurred = name in learned and tensor.is_floating_point()
        drawn = torch.randn(tensor.shape, generator=source).to(tensor) if blurred else None
        second[name] = tensor if drawn is None else tensor + noise * tensor.std(correction=0) * drawn  # (1)
    pair = DeepEnsemble([members.network(first), members.network(second)])
    return pair, symmetry, invert_orders(orders, symmetry)


def recover_planted(
    members: Ensemble, data: Data, options: PermutationOptions, noise: float, *, seed: int = 0
) -> Recovery:
    """Return the fraction of a planted permutation that each method recovers at one noise level.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        noise: The noise, in standard deviations of the weights.
        seed: The seed.
    """
    pair, symmetry, wanted = make_planted_pair(members, data, noise, seed=seed)
    first, second = states_of(pair)
    learned = set(pair.skeleton.parameters)
    found: dict[str, float | None] = {}
    for name, start in ((METHODS[0], None), (METHODS[1], options.matched or START)):
        with replace_titles(f"planted with noise {noise:g}, {name}"):
            found[name] = _recovered_by(replace(options, matched=start), pair, data, wanted)
    found[METHODS[2]] = _recovered_fraction(match_weights(first, second, symmetry, seed=seed, learned=learned), wanted)
    chance = len(wanted) / sum(len(order) for order in wanted.values())
    return Recovery(noise, found, chance)


def _recovered_by(
    options: PermutationOptions, pair: Ensemble, data: Data, wanted: Mapping[str, Tensor]
) -> float | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # only the positions of the largest entries are used
            found = train_alignment(pair, data, options)
    except Singular:
        return None
    orders = {group.name: each[0].argmax(1) for group, each in zip(found.groups, found.matrices, strict=True)}
    return _recovered_fraction(orders, wanted)


def _recovered_fraction(orders: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return equation (2) over the units of all groups."""
    right = sum(int((orders[name] == order).sum()) for name, order in wanted.items())
    return right / sum(len(order) for order in wanted.values())


def train_different_pair(
    network: nn.Module | Callable[[], nn.Module], data: Data, plan: TrainConfig, difference: Difference
) -> DeepEnsemble:
    """Train two members from scratch on different halves of the classes, or on shifted labels.

    Args:
        network: The network.
        data: The data.
        plan: The training settings.
        difference: What differs between the members: "classes" or "labels".
    """
    if difference not in get_args(Difference):
        choices = ", ".join(get_args(Difference))
        raise EnfoldError(f"difference must be one of {choices}, got {difference!r}: pass one of them")
    train, validation = data.train, data.val
    if not isinstance(train, Split) or not isinstance(validation, Split):
        raise EnfoldError("train and val must be in memory, got a loader: pass a Split for each")
    networks = []
    for index in range(2):
        own = data.replace(
            train=_lesson(train, data.known_classes(), difference, index),
            val=_lesson(validation, data.known_classes(), difference, index),
        )
        member, _ = initialize_member(network, plan.seed, index)
        fit(member, own, config=plan, title=f"different {difference}, training member {index + 1}")
        networks.append(member.cpu().eval())
    return DeepEnsemble(networks)


def _lesson(split: Split, num_classes: int, difference: Difference, index: int) -> Split:
    if difference == "labels":
        return replace(split, targets=(split.labels + index) % num_classes)
    lower = split.labels < (num_classes + 1) // 2
    return split[lower if index == 0 else ~lower]


def align_different_pair(
    members: DeepEnsemble, data: Data, options: PermutationOptions, difference: Difference
) -> DifferentPair:
    """Return scores and statistics of aligning members of `train_different_pair`, on all classes and true labels.

    Args:
        members: The members.
        data: The data.
        options: The options of permAVG.
        difference: What differs between the members: "classes" or "labels".
    """
    first, second = states_of(members)
    _, symmetry = find_mixable(members, data, options.config.seed)
    learned = set(members.skeleton.parameters)
    matched = match_state(first, second, symmetry, seed=options.config.seed, learned=learned)
    predictions = predict(members, data.test)
    with warnings.catch_warnings(action="ignore"), replace_titles(f"different {difference}, permAVG"):
        aligned = train_alignment(members, data, options)
    states = aligned.states()
    soft = compute_matrix_statistics(aligned.groups, aligned.matrices)
    return DifferentPair(
        difference,
        [accuracy(predictions.member(index)) for index in range(2)],
        score_average(members, [first, second], data),
        score_average(members, [first, matched], data),
        score_average(members, states, data),
        compute_row_statistics([first, second], states, aligned.groups),
        {each.group: each.softness[0] for each in soft},
    )
