"""MergeMany: each member in turn is matched by weights to the mean of the others until nothing changes; then averaged.

    P_m = argmax over permutations  <(1/(M-1)) Σ_{k≠m} P_k(θ_k), P(θ_m)>,   m in a random order, repeatedly        (1)
    θ̄  = (1/M) Σ_m P_m(θ_m)                                                                                       (2)

No member is the reference, so errors of matching to a single member do not accumulate with many members. A step of (1)
never increases the distance of a member to the mean of the others, so the sum of squared distances between all members
never increases.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836, algorithm 3.

Differs from the paper: groups are found for any network; nothing else known.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.merging import merge_aligned
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.seeds import derive, generator
from enfold.symmetry import match_weights, permute


@checked
def merge_many(
    models: Models,
    train: Examples | None = None,
    *,
    example: Any = None,
    rounds: Annotated[int, Field(ge=1)] = 100,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after matching each to the mean of the others, in turn.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        example: One or two inputs, (B, ...), in the structure that the network takes, to find its symmetries with; not
            needed with `train`.
        rounds: Maximum number of passes over all members.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order in which members and groups are matched.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("merge_many", models, train, example=example, repair=repair, unpack=unpack)
    return merge_aligned(inputs, partial(match_members, rounds=rounds, seed=seed), repair, seed)  # (2)


def match_members(alignment: Alignment, *, rounds: int, seed: int) -> list[State]:
    """Repeat equation (1) until no member changes."""
    symmetry, found = alignment.symmetry, list(alignment.states)
    source = generator(seed, "merge many")
    for number in range(rounds):
        changed = False
        for index in torch.randperm(len(found), generator=source).tolist():
            others = mean_of([state for other, state in enumerate(found) if other != index])
            own_seed = derive(seed, "merge many", number, index)
            orders = match_weights(others, found[index], symmetry, seed=own_seed, learned=alignment.parameters)  # (1)
            if any(not _is_identity(order) for order in orders.values()):
                found[index], changed = permute(found[index], symmetry, orders), True
        if not changed:
            break
    return found


def _is_identity(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order)))
