"""Matching: one network's units are put in the order in which its weights are nearest to another's.

    max over permutations P_g   <θ, P(θ')>   over all parameters, P = all P_g of a symmetry's groups               (1)

One P_g at a time, the others fixed, is a linear assignment problem on the sum over the group's axes of inner products
unit by unit, solved exactly; a step that does not raise (1) is not taken, and the first round without one is the last.
Heads and the units inside them are one problem together (see `gains`). Running statistics follow, but do not count.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Differs from the paper: groups are found for any network; where a tensor has a group on two axes, (1) is quadratic in
P_g, and the assignment of its linear part is taken only if (1) rises; the start is the higher one of two: the orders
that are given, as in the paper, and orders in which every group is placed by those tensors alone whose other groups
were placed before it, since the others compare units at random.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from enfold.engines.skeleton import RUNNING, State
from enfold.errors import EnfoldError
from enfold.symmetry.axes import Symmetry
from enfold.symmetry.climb import ROUNDS, climbed
from enfold.symmetry.permute import permute


@torch.no_grad()
def weight_matching(
    target: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    learned: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Orders, for `permute`, that bring a state near to the target; `learned` are the names of the tensors that count.

    Without `learned`, all tensors count but running statistics.
    """
    goal, held = (_counted(given, symmetry, learned) for given in (target, state))
    _require_same_shapes(goal, held)
    return climbed(goal, held, symmetry, seed=seed, rounds=rounds)


def matched_to(
    goal: State,
    state: State,
    symmetry: Symmetry,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    learned: set[str] | None = None,
) -> State:
    """The state with its units in the orders that weight matching finds nearest to the goal's."""
    return permute(state, symmetry, weight_matching(goal, state, symmetry, seed=seed, rounds=rounds, learned=learned))


def _counted(state: Mapping[str, Tensor], symmetry: Symmetry, learned: Collection[str] | None) -> State:
    """The tensors that count in equation (1), in float32 or float64."""
    found: State = {}
    for name in dict.fromkeys(axis.name for group in symmetry.groups for axis in group.axes if not axis.tied_to):
        if name not in state:
            raise EnfoldError(
                f"both states must hold every tensor of the symmetry, but '{name}' is missing in one: pass all "
                "parameters and buffers of each network"
            )
        if (name.rsplit(".", 1)[-1] not in RUNNING) if learned is None else (name in learned):
            found[name] = real(state[name].detach().cpu())
            if found[name].dtype != torch.float32:
                found[name] = found[name].double()
            if not bool(found[name].isfinite().all()):
                raise EnfoldError(f"weights must be finite to be matched, but '{name}' is not: leave that network out")
    return found


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as two real ones, along an axis behind all others: Re <a, b> is their inner product."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _require_same_shapes(goal: State, held: State) -> None:
    for name, tensor in goal.items():
        if tensor.shape != held[name].shape:
            raise EnfoldError(
                f"networks must have the same shapes to be matched, but '{name}' is {tuple(tensor.shape)} in one and "
                f"{tuple(held[name].shape)} in the other: use networks of one architecture"
            )
