"""Activation matching: hidden units are put in the order in which they are active like one member's, then averaged.

    P_m = argmax over permutations  Σ_i C[i, P(i)],   C = correlations of the reference's units with the member's  (1a)
                                                      or their second moments E[x_r x_mᵀ]                          (1b)
    θ̄  = (1/M) Σ_m P_m(θ_m),   P_r = identity                                                                     (2)

Each group of units is a separate linear assignment problem, solved exactly.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836 (1b); K. Jordan et al.: REPAIR, ICLR 2023, arXiv:2211.08403 (1a).

Differs from the papers: groups are found for any network; more than two members are all matched to the reference;
units that are observed at several layers (residual streams) are matched at all of them together; blocks (heads), and
groups that no layer shows, or none on the same samples in all members, are matched by weights.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.activations import Side
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.assign import best_order
from enfold.merge.common.inputs import Models, prepare_inputs, require_reference
from enfold.merge.common.merging import merge_aligned
from enfold.merge.common.split import match_unobserved
from enfold.merge.repair import RepairKind
from enfold.symmetry import permute

Likeness = Literal["correlation", "second_moment"]


@checked
def activation_matching(
    models: Models,
    train: Examples,
    *,
    reference: Annotated[int, Field(ge=0)] = 0,
    likeness: Likeness = "correlation",
    watch: Side = "inputs",
    examples: Annotated[int, Field(ge=1)] = 4096,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after matching their hidden units to one member's by activations.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples on which units are compared.
        reference: Index of the member whose order the others are put in.
        likeness: Similarity of two units: "correlation", or "second_moment", which is not centred.
        watch: Where units are observed: as "inputs" of the next layers, or as "outputs" of their own.
        examples: Maximum number of training examples.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples and of matching.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or training examples are missing.
    """
    inputs = prepare_inputs("activation_matching", models, train, needs_train=True, unpack=unpack)
    match = partial(match_members, reference=reference, likeness=likeness, watch=watch, examples=examples, seed=seed)
    return merge_aligned(inputs, match, repair, seed)  # (2)


def match_members(
    alignment: Alignment, *, reference: int, likeness: Likeness, watch: Side, examples: int, seed: int
) -> list[State]:
    """Return each member in the order of equation (1).

    Args:
        alignment: The members and their groups of units.
        reference: The member whose order the others are matched to.
        likeness: The measure of similarity of two units.
        watch: Whether inputs or outputs of layers are observed.
        examples: The number of training examples.
        seed: The seed.
    """
    require_reference(reference, len(alignment.states))
    states, moments = match_unobserved(alignment, reference, watch, seed, examples=examples)
    found = []
    for index, state in enumerate(states):
        orders = {}
        for name, one in moments.items() if index != reference else ():
            similarity = one.correlation() if likeness == "correlation" else one.second()
            orders[name] = best_order(one.block(similarity, reference, index))  # (1)
        found.append(permute(state, alignment.symmetry, orders))
    return found
