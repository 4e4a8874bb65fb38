"""Matching: one network's units are put in the order in which its weights are nearest to another's.

    max over permutations P_g   <θ, P(θ')>   over all parameters, P = all P_g of a symmetry's groups               (1)

One P_g at a time, the others fixed, is a linear assignment problem on the sum over the group's axes of inner products
unit by unit, solved exactly; a step that does not raise (1) is not taken, and the first round without one is the last.
Running statistics follow, but do not count.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Differs from the paper: groups are found for any network; where a tensor has a group on two axes, (1) is quadratic in
P_g, and the assignment of its linear part is taken only if (1) rises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.members import Members, Stacked, State
from enfold.seeds import generator
from enfold.symmetry.axes import Axis, Group, Symmetry
from enfold.symmetry.find import symmetries
from enfold.symmetry.permute import permute, permuted

ROUNDS = 100
RUNNING = ("running_mean", "running_var", "running_std")


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
    from scipy.optimize import linear_sum_assignment

    goal, held = (_counted(given, symmetry, learned) for given in (target, state))
    _require_same_shapes(goal, held)
    places, products = _Places(symmetry), _Products(goal, held, symmetry)
    source = generator(seed, "match units")
    settled: set[int] = set()  # groups that were at their best, and nothing beside them has moved since
    for _ in range(rounds):
        for index in torch.randperm(len(symmetry.groups), generator=source).tolist():
            if index in settled or not products.axes[index]:
                settled.add(index)
                continue
            group, axes, gains = symmetry.groups[index], products.axes[index], products(held, index)
            order = torch.as_tensor(linear_sum_assignment(gains.numpy(), maximize=True)[1])
            gain = float(gains.gather(1, order.unsqueeze(1)).sum() - gains.trace())
            threshold = torch.finfo(gains.dtype).eps * group.size * float(gains.abs().max())  # no more than rounding
            settled.add(index)
            if gain <= threshold:
                continue
            moved = permuted(held, Group(group.name, group.size, tuple(axes)), order)
            quadratic = _is_quadratic(axes)
            certain = not quadratic and gain > products.rounding[index]
            if certain or _rise(goal, held, moved, axes) > threshold:
                held = moved
                places.move(group, order)
                products.move(index, order)
                settled -= products.beside[index] if quadratic else products.beside[index] - {index}
        if len(settled) == len(symmetry.groups):
            break
    return places.orders(symmetry)


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


@torch.no_grad()
def match(members: Members, *, example: Tensor, seed: int = 0) -> Stacked:
    """The members with their units in the orders that are nearest to member 0's; each stays the same function.

    `example` is a few inputs, (B, ...); see `symmetries`, which finds what may be permuted.
    """
    stacked = {name: tensor.detach() for name, tensor in members.expand().items()}
    states = [{name: tensor[index] for name, tensor in stacked.items()} for index in range(members.num_members)]
    network = members.network(states[0])
    symmetry = symmetries(network, example, seed=seed)
    if symmetry.note and not symmetry.groups:
        raise EnfoldError(
            f"hidden units are matched in networks whose symmetries are known, but in this {type(network).__name__} "
            f"{symmetry.note}: leave matching out for it"
        )
    learned = set(members.skeleton.parameters)
    matched = [states[0], *(matched_to(states[0], state, symmetry, seed=seed, learned=learned) for state in states[1:])]
    return Stacked([members.network(state) for state in matched], members.engine_name)


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
            found[name] = state[name].detach().cpu()
            if found[name].dtype != torch.float32:
                found[name] = found[name].double()
            if not bool(found[name].isfinite().all()):
                raise EnfoldError(f"weights must be finite to be matched, but '{name}' is not: leave that network out")
    return found


def _require_same_shapes(goal: State, held: State) -> None:
    for name, tensor in goal.items():
        if tensor.shape != held[name].shape:
            raise EnfoldError(
                f"networks must have the same shapes to be matched, but '{name}' is {tuple(tensor.shape)} in one and "
                f"{tuple(held[name].shape)} in the other: use networks of one architecture"
            )


class _Products:
    """<unit i of the goal, unit j of what is held>, (units, units), over all axes of a group.

    Where no other group moves a tensor, its products stay the same, in another order, and are computed once.
    """

    def __init__(self, goal: State, held: State, symmetry: Symmetry) -> None:
        self.goal = goal
        lengths = {name: float(goal[name].norm()) * float(held[name].norm()) for name in goal}
        single = all(tensor.dtype == torch.float32 for state in (goal, held) for tensor in state.values())
        inside = 1e-20 < sum(lengths.values()) < 1e20  # far from the ends of float32's range
        self.dtype = torch.float32 if single and inside else torch.float64
        self.axes = [[axis for axis in group.axes if axis.name in goal] for group in symmetry.groups]
        names = [{axis.name for axis in axes} for axes in self.axes]
        self.beside = [{k for k, other in enumerate(names) if own & other} for own in names]
        places = Counter(axis.name for axes in self.axes for axis in axes)
        self.moving = [[axis for axis in axes if places[axis.name] > 1] for axes in self.axes]
        alone = [[axis for axis in axes if places[axis.name] == 1] for axes in self.axes]
        self.fixed = [self._sum(held, own, group.size) for own, group in zip(alone, symmetry.groups, strict=True)]
        eps = torch.finfo(self.dtype).eps  # sums that cancel out are wrong by a part of this, whatever is left of them
        self.rounding = [100 * eps * sum(lengths[axis.name] for axis in axes) for axes in self.axes]

    def __call__(self, held: State, index: int) -> Tensor:
        """Those of one group."""
        fixed = self.fixed[index]
        return fixed + self._sum(held, self.moving[index], len(fixed))

    def move(self, index: int, order: Tensor) -> None:
        """Units in another order."""
        self.fixed[index] = self.fixed[index][:, order]

    def _sum(self, held: State, axes: list[Axis], size: int) -> Tensor:
        found = torch.zeros(size, size, dtype=self.dtype)
        for axis in axes:
            found.addmm_(
                axis.by_unit(self.goal[axis.name]).to(self.dtype), axis.by_unit(held[axis.name]).mT.to(self.dtype)
            )
        return found


def _is_quadratic(axes: list[Axis]) -> bool:
    return len({axis.name for axis in axes}) < len({(axis.name, axis.axis) for axis in axes})


def _rise(goal: State, held: State, moved: State, axes: list[Axis]) -> float:
    """By how much (1) is higher after a move, in float64."""
    pairs = {axis.name: (moved[axis.name].double() - held[axis.name], goal[axis.name]) for axis in axes}
    return sum(float((change * theirs).sum()) for change, theirs in pairs.values())


class _Places:
    """Where each place of each axis came from: moves inside and of blocks are put into one order a group by it."""

    def __init__(self, symmetry: Symmetry) -> None:
        self.now = self._start(symmetry)

    @staticmethod
    def _start(symmetry: Symmetry) -> dict[tuple[str, int], Tensor]:
        ends: dict[tuple[str, int], int] = {}
        for group in symmetry.groups:
            for axis in group.axes:
                key = (axis.name, axis.axis)
                ends[key] = max(ends.get(key, 0), axis.offset + axis.length)
        return {key: torch.arange(end) for key, end in ends.items()}

    def move(self, group: Group, order: Tensor) -> None:
        """Units in another order."""
        for axis in group.axes:
            key, flat = (axis.name, axis.axis), replace(axis, axis=0)
            self.now[key] = flat.with_units(self.now[key], flat.units_first(self.now[key])[order])

    def orders(self, symmetry: Symmetry) -> dict[str, Tensor]:
        """What `permute` needs to get here; a group of blocks comes before the groups inside its blocks."""
        found, here = {}, _Places(symmetry)
        for group in symmetry.groups:
            axis = replace(group.axes[0], axis=0)
            key = (axis.name, group.axes[0].axis)
            ours, wanted = (axis.by_unit(places[key]).sort(1).values[:, 0] for places in (here.now, self.now))
            found[group.name] = (wanted.unsqueeze(1) == ours).long().argmax(1)
            here.move(group, found[group.name])
        return found
