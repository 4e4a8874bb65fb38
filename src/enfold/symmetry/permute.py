"""Apply permutations (hard) or matrices and their inverses (soft) to the units of a state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.symmetry.axes import Axis, Group, Symmetry


def permute_state(state: Mapping[str, Tensor], group: Group, order: Tensor) -> State:
    """Return the state with unit order[k] of the group at index k.

    Args:
        state: Parameters and buffers by name; not modified.
        group: The group to permute.
        order: A permutation of 0 ... size - 1.
    """
    return apply_orders(state, [(group, order)])


def apply_orders(state: Mapping[str, Tensor], moves: Iterable[tuple[Group, Tensor]]) -> State:
    """Return the state after permuting one group after the other.

    Permutations along the same axis are composed first, so that each tensor is indexed once per axis; only units within
    a range of another axis are moved separately.
    """
    found, owned = dict(state), set[str]()
    pending: dict[str, dict[int, Tensor]] = {}  # source indices by tensor and axis
    for group, order in moves:
        _require_order(group, order)
        for axis in _present(found, group):
            tensor = found[axis.name]
            if not axis.within:
                line = replace(axis, axis=0)
                places = pending.setdefault(axis.name, {}).setdefault(axis.axis, torch.arange(tensor.shape[axis.axis]))
                pending[axis.name][axis.axis] = line.with_units(places, line.units_first(places)[order])
                continue
            if axis.name in pending or axis.name not in owned:
                tensor = found[axis.name] = _index_axes(tensor.clone(), pending.pop(axis.name, {}))
                owned.add(axis.name)
            units = axis.units_first(tensor)
            units.copy_(units.index_select(0, order.to(tensor.device)))
    return found | {name: _index_axes(found[name], places) for name, places in pending.items()}


def _index_axes(tensor: Tensor, places: Mapping[int, Tensor]) -> Tensor:
    for axis, where in places.items():
        tensor = tensor.index_select(axis, where.to(tensor.device))
    return tensor


def _require_order(group: Group, order: Tensor) -> None:
    places = torch.arange(group.size)
    if order.is_floating_point() or order.shape != (group.size,) or not torch.equal(order.cpu().sort().values, places):
        raise EnfoldError(
            f"an order of the group '{group.name}' must contain each of 0 to {group.size - 1} once, got "
            f"{tuple(order.shape)} values of {order.dtype}: use torch.randperm({group.size}) or the like"
        )


def permute(state: Mapping[str, Tensor], symmetry: Symmetry, orders: Mapping[str, Tensor]) -> State:
    """Return the state with the named groups permuted, in the order in which the symmetry lists them.

    Args:
        state: Parameters and buffers by name; not modified.
        symmetry: The symmetry of the network.
        orders: Permutations by name of the group.

    Raises:
        EnfoldError: If a name is not a group of the symmetry, or an order is not a permutation.
    """
    unknown = sorted(orders.keys() - {group.name for group in symmetry.groups})
    if unknown:
        raise EnfoldError(f"orders must be of groups of the symmetry, got '{unknown[0]}': print(symmetry) lists them")
    return apply_orders(state, ((group, orders[group.name]) for group in symmetry.groups if group.name in orders))


def soft(state: Mapping[str, Tensor], group: Group, matrix: Tensor, inverse: Tensor) -> State:
    """Return the state with producing axes multiplied by `matrix` and consuming axes by `inverse`.

    Differentiable in both. A permutation matrix with P[k, order[k]] = 1 and its transpose are equivalent to `permuted`.

    Args:
        state: Parameters and buffers by name; not modified.
        group: The group to transform.
        matrix: (size, size).
        inverse: The inverse of `matrix`.

    Raises:
        EnfoldError: If a shape does not match, or a tied tensor both produces and consumes the units.
    """
    for name, given in (("matrix", matrix), ("inverse", inverse)):
        if given.shape != (group.size, group.size):
            raise EnfoldError(
                f"the {name} of the group '{group.name}' must be {group.size} x {group.size}, got "
                f"{tuple(given.shape)}: pass one row per unit"
            )
    tied = next((axis for axis in group.axes if axis.role == "both"), None)
    if tied is not None:
        raise EnfoldError(
            f"'{tied.name}' both produces and consumes the units of '{group.name}', so only a "
            "permutation is consistent with both uses: use permuted, or omit this group"
        )
    found = dict(state)
    for axis in _present(found, group):
        tensor = found[axis.name]
        factor = inverse.mT if axis.divided else matrix
        units = axis.units_first(tensor)
        factor = factor.to(units) if units.is_floating_point() or units.is_complex() else factor
        found[axis.name] = axis.with_units(tensor, torch.tensordot(factor, units, dims=1))
    return found


def _present(state: Mapping[str, Tensor], group: Group) -> Iterator[Axis]:
    for axis in group.axes:
        if axis.name in state:
            shape = tuple(state[axis.name].shape)
            ends = {axis.axis: axis.offset + axis.length} | {other: start + n for other, start, n in axis.within}
            if any(other >= len(shape) or end > shape[other] for other, end in ends.items()):
                raise EnfoldError(
                    f"a state must have the shapes of the network whose symmetry it is, but '{axis.name}' is {shape} "
                    f"and axis {axis.axis} must contain {axis.offset + axis.length}: find its own network's symmetries"
                )
            yield axis
        elif axis.tied_to is None:
            raise EnfoldError(
                f"a state must contain all tensors of the group '{group.name}', but '{axis.name}' is missing: pass all "
                "parameters and buffers of the network"
            )


def invert_orders(orders: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Return the orders that undo these; needed because units inside blocks move when the blocks do."""
    places = OrderTracker(symmetry)
    for group in symmetry.groups:
        if group.name in orders:
            places.move(group, orders[group.name])
    places.now = {key: came.flatten().argsort().view(came.shape) for key, came in places.now.items()}
    return places.orders(symmetry)


class OrderTracker:
    """The origin of every index of every axis: composes moves of blocks and inside blocks into one order per group.

    Axes of a tensor of which one is moved within a range of the other are tracked together.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.together: dict[str, list[set[int]]] = {}
        ends: dict[tuple[str, int], int] = {}
        for axis in (axis for group in symmetry.groups for axis in group.axes):
            own, apart = {axis.axis, *(other for other, _, _ in axis.within)}, []
            for known in self.together.get(axis.name, []):
                if own & known:
                    own |= known
                else:
                    apart.append(known)
            self.together[axis.name] = [*apart, own]
            for other in own:
                ends[axis.name, other] = max(ends.get((axis.name, other), 0), sum(axis.span(other) or (0,)))
        self.now = {
            (name, min(axes)): _number_entries([ends[name, k] if k in axes else 1 for k in range(max(axes) + 1)])
            for name, sets in self.together.items()
            for axes in sets
        }

    def _key(self, axis: Axis) -> tuple[str, int]:
        return axis.name, min(next(axes for axes in self.together[axis.name] if axis.axis in axes))

    def move(self, group: Group, order: Tensor) -> None:
        """Apply an order to a group."""
        for axis in group.axes:
            now = self.now[self._key(axis)]
            self.now[self._key(axis)] = axis.with_units(now, axis.units_first(now)[order])

    def orders(self, symmetry: Symmetry) -> dict[str, Tensor]:
        """Return the orders for `permute` that lead to the current state; blocks precede the groups inside them."""
        found, here = {}, OrderTracker(symmetry)
        for group in symmetry.groups:
            axis = group.axes[0]
            key = self._key(axis)
            ours, wanted = (axis.by_unit(places[key]).sort(1).values[:, 0] for places in (here.now, self.now))
            found[group.name] = (wanted.unsqueeze(1) == ours).long().argmax(1)
            here.move(group, found[group.name])
        return found


def _number_entries(sizes: Sequence[int]) -> Tensor:
    return torch.arange(prod(sizes)).view(sizes)
