"""Steps that all merges have in common: inputs, matching, averaging and repair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from enfold.engines.skeleton import State
from enfold.merge.common.activations import Moments, Side
from enfold.merge.common.alignment import Alignment, Match
from enfold.merge.common.inputs import MergeInputs
from enfold.merge.common.split import match_unobserved
from enfold.merge.common.states import find_units, mean_of, states_of
from enfold.merge.repair import RepairKind, repair_network
from enfold.symmetry import Symmetry


def align_members(inputs: MergeInputs, match: Match, seed: int, checkpoint: str | Path | None = None) -> list[State]:
    """Return the states of the members after matching their units.

    Args:
        inputs: The members and data.
        match: The method of matching.
        seed: Seed of everything that is drawn.
        checkpoint: A file for methods that train.
    """
    states = states_of(inputs.ensemble)
    symmetry = find_units(inputs.ensemble.network(states[0]), inputs.require_example(), seed)
    if not symmetry.groups or len(states) == 1:
        return states
    file = None if checkpoint is None else Path(checkpoint)
    with torch.random.fork_rng(devices=[]):
        return match(Alignment(inputs.ensemble, states, symmetry, inputs.data, file))


def merge_aligned(
    inputs: MergeInputs, match: Match, repair: RepairKind, seed: int, checkpoint: str | Path | None = None
) -> nn.Module:
    """Return the mean of the members after matching their units; a single member is returned unchanged.

    Args:
        inputs: The inputs of the merge.
        match: Returns the states of the members after matching.
        repair: The kind of repair.
        seed: The seed.
        checkpoint: File of the training checkpoint, from which an interrupted training continues.
    """
    if inputs.ensemble.num_members == 1:
        return inputs.ensemble.member(0).eval()
    return build_network(inputs, mean_of(align_members(inputs, match, seed, checkpoint)), repair, seed)


def observe_members(
    inputs: MergeInputs, reference: int, watch: Side, seed: int, examples: int
) -> tuple[Symmetry, list[State], dict[str, Moments]]:
    """Return the groups of units, the members' states and the moments of the units that are to be mixed.

    Groups that activations cannot match are matched by weights before (see `match_unobserved`).

    Args:
        inputs: The inputs of the merge.
        reference: The member whose order the others are matched to.
        watch: Whether inputs or outputs of layers are observed.
        seed: The seed.
        examples: The number of training examples.
    """
    states = states_of(inputs.ensemble)
    symmetry = find_units(inputs.ensemble.network(states[reference]), inputs.require_example(), seed)
    alignment = Alignment(inputs.ensemble, states, symmetry, inputs.data)
    found, moments = match_unobserved(alignment, reference, watch, seed, examples=examples, mixed=True)
    return symmetry, found, moments


def build_network(
    inputs: MergeInputs, state: State, repair: RepairKind, seed: int, weights: Sequence[float] | None = None
) -> nn.Module:
    """Return a network with merged values in eval mode, after correcting the statistics of its hidden units.

    Args:
        inputs: The inputs of the merge.
        state: The weights.
        repair: The kind of repair.
        seed: The seed.
        weights: The weights of the members in the mean; equal by default.
    """
    network = inputs.ensemble.network(state)
    return repair_network(network, inputs.ensemble, inputs.data, repair, seed=seed, weights=weights).eval()
