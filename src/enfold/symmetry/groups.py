"""Groups that the labels of a graph allow, with what to try if one of them cannot be verified."""

from __future__ import annotations

from dataclasses import dataclass, replace

from enfold.symmetry.axes import Axis, Fixed, Group, Role
from enfold.symmetry.space import Product
from enfold.symmetry.walk import Place, Walk


@dataclass(frozen=True)
class Candidate:
    """Groups of one label; `instead` is coarser, where units inside blocks were taken to be independent."""

    groups: tuple[Group, ...]
    instead: tuple[Group, ...] = ()


@dataclass(frozen=True)
class _Found:
    axis: Axis
    left: int | None  # the label of the blocks in which the units lie
    blocks: int


def candidates(walk: Walk, aliases: dict[str, list[str]]) -> list[Candidate]:
    """One for each label that is free, in the order in which the tensors are listed."""
    found: dict[int, list[_Found]] = {}
    for name, value in walk.tensors.items():
        for axis, term in enumerate(value.terms):
            offset = 0
            for product in walk.space.normal(term):
                for index, label in enumerate(product):
                    if walk.space.reason(label) is None:
                        place = _found(walk, product, index, (name, axis), offset)
                        found.setdefault(label, []).append(place)
                offset += walk.space.places(product)
    names: set[str] = set()
    return [_candidate(places, aliases, names) for places in found.values()]


def _found(walk: Walk, product: Product, index: int, place: Place, offset: int) -> _Found:
    space = walk.space
    size, outer, inner = (
        space.places(part) for part in (product[index : index + 1], product[:index], product[index + 1 :])
    )
    role: Role = "consumes" if place in walk.consumed else "produces"
    if place in walk.consumed and place in walk.produced:
        role = "both"
    left = product[index - 1] if index else None
    blocks = space.places((left,)) if left is not None else 1
    return _Found(Axis(*place, size, role, offset, outer, inner), left, blocks)


def _candidate(places: list[_Found], aliases: dict[str, list[str]], names: set[str]) -> Candidate:
    whole = _group([place.axis for place in places], aliases, names)
    if places[0].left is None or len({place.left for place in places}) > 1:
        return Candidate((whole,))
    names.discard(whole.name)
    inside = []
    for block in range(places[0].blocks):
        axes = [axis for place in places for axis in _in_block(place, block)]
        inside.append(_group(axes, aliases, names))
    return Candidate(tuple(inside), (whole,))


def _in_block(place: _Found, block: int) -> list[Axis]:
    """The units of one block only: once for each repetition of all blocks."""
    axis = place.axis
    stride = axis.size * axis.inner
    starts = [axis.offset + (outer * place.blocks + block) * stride for outer in range(axis.outer // place.blocks)]
    return [replace(axis, offset=start, outer=1) for start in starts]


def _group(axes: list[Axis], aliases: dict[str, list[str]], names: set[str]) -> Group:
    first = next((axis for axis in axes if axis.role != "consumes"), axes[0])
    name = first.name.removesuffix(".weight").removesuffix(".bias")
    if first.inner > 1:
        name += f" in blocks of {first.inner}"
    if first.offset or first.outer > 1 or any(f"{name}" == known for known in names):
        name += f" from {first.offset}"
    while name in names:
        name += "'"
    names.add(name)
    tied = [replace(axis, name=alias, tied_to=axis.name) for axis in axes for alias in aliases.get(axis.name, [])]
    return Group(name, first.size, (*axes, *tied))


def fixed_axes(walk: Walk, groups: list[Group], refused: dict[Place, str]) -> list[Fixed]:
    """All axes with more than one place of which some are in no group."""
    covered: dict[Place, set[int]] = {}
    for group in groups:
        for axis in group.axes:
            places = range(axis.offset, axis.offset + axis.length)
            covered.setdefault((axis.name, axis.axis), set()).update(places)
    found = []
    for name, value in walk.tensors.items():
        for number, term in enumerate(value.terms):
            size = walk.space.size(term)
            if size > 1 and len(covered.get((name, number), ())) < size:
                labels = [label for product in walk.space.normal(term) for label in product]
                reasons = [reason for label in labels if (reason := walk.space.reason(label)) is not None]
                found.append(
                    Fixed(
                        name,
                        number,
                        refused.get((name, number)) or next(iter(reasons), "a part of it is a single place"),
                    )
                )
    return found
