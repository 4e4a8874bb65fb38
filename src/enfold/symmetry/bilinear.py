"""Find units that two weights produce and that are contracted with each other, such as queries and keys.

    qᵀ k = (P q)ᵀ (P^-ᵀ k)                                                                    (1)

No weight consumes such units. A permutation acts on both sides in the same way, and any other matrix P preserves (1)
if one of the sides is multiplied by P^-ᵀ. Which side that is cannot be read from the graph, so it is tested: with
random matrices the outputs must not change, which fails if there is a norm or a rotation in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from torch import Tensor

from enfold.symmetry.axes import Axis, Group
from enfold.symmetry.verify import Verifier

MOST = 16  # layers of a group for which divisions are tested
FEW = 4  # up to this many layers all divisions are tested; with more, one layer against the others


def assign_bilinear_roles(verifier: Verifier, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with the role "meets" for axes that are contracted with the others."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, group in enumerate(groups):
        made = all(axis.role == "produces" and _is_numeric(verifier.state.get(axis.name)) for axis in group.axes)
        if made and 2 <= len(_layers(group)) <= MOST:
            key = tuple(re.sub(r"\d+", "#", name) for name, _ in _layers(group))  # of all blocks of a network
            kinds.setdefault(key, []).append(index)
    found = list(groups)
    for indices in kinds.values():
        together = _split_sides(verifier, [groups[index] for index in indices])
        for number, index in enumerate(indices if together or len(indices) > 1 else ()):
            divided = together[number : number + 1] if together else _split_sides(verifier, [groups[index]])
            found[index] = divided[0] if divided else groups[index]
    return found


def _split_sides(verifier: Verifier, groups: Sequence[Group]) -> list[Group] | None:
    """Return the groups divided into the same two sides, if some division passes the test."""
    for side in _sides(len(_layers(groups[0]))):
        tried = [_assign_side(group, side) for group in groups]
        if verifier.is_invariant_to_matrices(tried):
            return tried
    return None


def _is_numeric(tensor: Tensor | None) -> bool:
    """Return whether a tensor can be multiplied by a matrix; aliases of tied tensors have no values of their own."""
    return tensor is None or tensor.is_floating_point() or tensor.is_complex()


def _layers(group: Group) -> list[tuple[str, int]]:
    """Return the layers, or parts of layers, that produce the units, by name and offset."""
    return list(dict.fromkeys(_layer(axis) for axis in group.axes if axis.tied_to is None))


def _layer(axis: Axis) -> tuple[str, int]:
    return re.sub(r"\.?(weight|bias)$", "", axis.tied_to or axis.name), axis.offset


def _sides(layers: int) -> Iterator[tuple[int, ...]]:
    """Yield one of two non-empty sides, the last layer first."""
    for size in range(1, layers // 2 + 1 if layers <= FEW else 2):
        yield from combinations(range(layers - 1, -1, -1), size)


def _assign_side(group: Group, side: Sequence[int]) -> Group:
    layers = _layers(group)
    chosen = {layers[index] for index in side}
    axes = (replace(axis, role="meets") if _layer(axis) in chosen else axis for axis in group.axes)
    return replace(group, axes=tuple(axes))
