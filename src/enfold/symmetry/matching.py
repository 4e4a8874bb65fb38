"""Matching: put the units of one network in the order in which its weights are nearest to another's.

    max over permutations P_g   <θ, P(θ')>   over all parameters, P = all P_g of a symmetry's groups               (1)

One P_g at a time, the others fixed, is a linear assignment problem on the sum over the group's axes of inner products
unit by unit, solved exactly; a step that does not increase (1) is rejected, and the first round without a step is the
last. Heads and the units inside them are one problem (see `assignment`). Running statistics are permuted, but not
compared.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Differs from the paper: groups are found for any network; where a tensor has a group on two axes, (1) is quadratic in
P_g, and the assignment of its linear part is accepted only if (1) increases; the start is the better one of two: the
given orders, as in the paper, and orders in which every group is placed only by tensors whose other groups were placed
before it, since the others compare units at random.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from enfold.engines.skeleton import RUNNING, State
from enfold.errors import EnfoldError
from enfold.symmetry.ascent import ROUNDS, ascend
from enfold.symmetry.axes import Symmetry
from enfold.symmetry.permute import permute


@torch.no_grad()
def match_weights(
    target: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    learned: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return orders, for `permute`, that bring a state near the target.

    Args:
        target: Parameters and buffers of the network whose order is matched.
        state: Parameters and buffers of the network that is to be permuted.
        symmetry: The groups of units that may be permuted.
        seed: Seed of the order in which groups are matched.
        rounds: Maximum number of passes over all groups.
        learned: Names of the tensors that are compared; by default all but running statistics.

    Raises:
        EnfoldError: If a tensor is missing, not finite, or of different shapes.
    """
    goal, held = (_compared_tensors(given, symmetry, learned) for given in (target, state))
    _require_same_shapes(goal, held)
    return ascend(goal, held, symmetry, seed=seed, rounds=rounds)


def match_state(
    goal: State,
    state: State,
    symmetry: Symmetry,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    learned: set[str] | None = None,
) -> State:
    """Return the state with its units in the orders of `match_weights`.

    Args:
        goal: The state to match.
        state: The state to permute.
        symmetry: The groups of units.
        seed: The seed.
        rounds: The maximum number of rounds.
        learned: The names of the tensors that are compared; by default all but running statistics.
    """
    return permute(state, symmetry, match_weights(goal, state, symmetry, seed=seed, rounds=rounds, learned=learned))


def _compared_tensors(state: Mapping[str, Tensor], symmetry: Symmetry, learned: Collection[str] | None) -> State:
    """Return the tensors that are compared in equation (1), in float32 or float64."""
    found: State = {}
    for name in dict.fromkeys(axis.name for group in symmetry.groups for axis in group.axes if not axis.tied_to):
        if name not in state:
            raise EnfoldError(
                f"both states must contain every tensor of the symmetry, but '{name}' is missing in one: pass all "
                "parameters and buffers of each network"
            )
        if (name.rsplit(".", 1)[-1] not in RUNNING) if learned is None else (name in learned):
            found[name] = as_real(state[name].detach().cpu())
            if found[name].dtype != torch.float32:
                found[name] = found[name].double()
            if not bool(found[name].isfinite().all()):
                raise EnfoldError(f"weights must be finite to be matched, but '{name}' is not: remove that network")
    return found


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as two real ones along a last axis: Re <a, b> is their inner product."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _require_same_shapes(goal: State, held: State) -> None:
    for name, tensor in goal.items():
        if tensor.shape != held[name].shape:
            raise EnfoldError(
                f"networks must have the same shapes to be matched, but '{name}' is {tuple(tensor.shape)} in one and "
                f"{tuple(held[name].shape)} in the other: use networks of one architecture"
            )
