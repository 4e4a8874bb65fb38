"""Weight matching: hidden units of all members are put in the order nearest to one member's weights, then averaged.

    P_m = argmax over permutations  <θ_r, P(θ_m)>   of every group of units that may be permuted                  (1)
    θ̄  = (1/M) Σ_m P_m(θ_m),   P_r = identity                                                                     (2)

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Needs no data except for batch-norm statistics. Exact for one hidden layer; otherwise a local optimum of (1), found
group by group, that is never below the members' own order.

Differs from the paper: groups are found for any network; more than two members are all matched to the reference (see
`merge_many` for the paper's method for many).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.inputs import Models, prepare_inputs, require_reference
from enfold.merge.common.merging import merge_aligned
from enfold.merge.repair import RepairKind
from enfold.symmetry import match_state


@checked
def weight_matching(
    models: Models,
    train: Examples | None = None,
    *,
    example: Any = None,
    reference: Annotated[int, Field(ge=0)] = 0,
    rounds: Annotated[int, Field(ge=1)] = 100,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after matching their hidden units to one member's by weights.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        example: One or two inputs, (B, ...), in the structure that the network takes, to find its symmetries with; not
            needed with `train`.
        reference: Index of the member whose order the others are put in.
        rounds: Maximum number of passes over all groups of units.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order in which groups are matched.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("weight_matching", models, train, example=example, repair=repair, unpack=unpack)
    match = partial(match_members, reference=reference, rounds=rounds, seed=seed)
    return merge_aligned(inputs, match, repair, seed)  # (2)


def match_members(alignment: Alignment, *, reference: int, rounds: int, seed: int) -> list[State]:
    """Return each member in the order of equation (1).

    Args:
        alignment: The members and their groups of units.
        reference: The member whose order the others are matched to.
        rounds: The maximum number of rounds.
        seed: The seed.
    """
    states = alignment.states
    target = states[require_reference(reference, len(states))]
    return [
        state
        if state is target
        else match_state(
            target, state, alignment.symmetry, seed=seed, rounds=rounds, learned=alignment.parameters
        )  # (1)
        for state in states
    ]
