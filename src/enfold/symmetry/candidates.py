"""Candidate groups that the labels allow, with coarser alternatives in case one cannot be verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product as every

from enfold.symmetry.axes import Axis, Fixed, Group, Role
from enfold.symmetry.labels import Product, Term
from enfold.symmetry.tracer import AxisTracer, TensorAxis


@dataclass(frozen=True)
class Candidate:
    """Groups of one label in several versions, from fine to coarse.

    The finest gives units an order of their own in every block (head, expert), the coarsest one order for all blocks.
    There may be as many blocks as a weight has entries, so groups are built only when they are needed.
    """

    places: tuple[TensorAxis, ...]  # the axes with the label
    build: Callable[[], tuple[tuple[Group, ...], ...]]
    single_order: bool = False  # also the finest version has one order for blocks that might have their own

    @cached_property
    def options(self) -> tuple[tuple[Group, ...], ...]:
        """The groups of each version."""
        return self.build()

    @property
    def names(self) -> set[str]:
        """The tensors that have the label along an axis."""
        return {name for name, _ in self.places}


@dataclass(frozen=True)
class _Occurrence:
    """A label along an axis of a tensor."""

    place: TensorAxis
    role: Role
    offset: int
    product: Product  # the product that contains the label, and its index there
    index: int
    terms: tuple[Term, ...]  # of the tensor

    def axis_of(self, outer: int) -> int | None:
        """Return the axis along which blocks are separated; None if that is ambiguous."""
        if outer in self.product:
            clear = self.product.count(outer) == self.product[: self.index].count(outer) == 1
            return self.place[1] if clear else None
        found = [
            axis for axis, term in enumerate(self.terms) for product in term for label in product if label == outer
        ]
        return found[0] if len(found) == 1 else None

    @property
    def is_indexed(self) -> bool:
        """True if indices of another axis of the tensor are used one by one, like experts in a loop."""
        return any(() in term and len(term) > 1 for axis, term in enumerate(self.terms) if axis != self.place[1])


def find_candidates(tracer: AxisTracer, aliases: dict[str, list[str]]) -> list[Candidate]:
    """Return one candidate per free label, in the order of the tensors, but blocks before the units inside them."""
    found: dict[int, list[_Occurrence]] = {}
    for name, value in tracer.tensors.items():
        terms = tuple(tracer.labels.expand(term) for term in value.terms)
        for axis, term in enumerate(terms):
            offset = 0
            for product in term:
                for index, label in enumerate(product):
                    place = _Occurrence((name, axis), _role(tracer, (name, axis)), offset, product, index, terms)
                    found.setdefault(label, []).append(place)
                offset += tracer.labels.places(product)
    blocks = _blocks(tracer, found)
    listed: dict[int, Candidate] = {}

    def add(label: int) -> None:
        if tracer.labels.reason(label) is None and label not in listed:
            for outer in blocks[label]:
                add(outer)
            listed[label] = _candidate(tracer, found[label], blocks[label], aliases)

    for label in found:
        add(label)
    return list(listed.values())


def _role(tracer: AxisTracer, place: TensorAxis) -> Role:
    if place in tracer.consumed:
        return "both" if place in tracer.produced else "consumes"
    return "produces"


def _blocks(tracer: AxisTracer, found: Mapping[int, Sequence[_Occurrence]]) -> dict[int, list[int]]:
    """Return, by label, the labels of the blocks that contain its units everywhere."""
    along = tracer.common_labels()
    first = {label: number for number, label in enumerate(found)}

    def outside(label: int, outer: int) -> bool:
        return tracer.labels.reason(outer) is not None or label not in along[outer] or first[outer] < first[label]

    return {
        label: sorted((one for one in along[label] & first.keys() if outside(label, one)), key=first.__getitem__)
        for label in found
        if tracer.labels.reason(label) is None
    }


def _candidate(
    tracer: AxisTracer, places: Sequence[_Occurrence], blocks: Sequence[int], aliases: dict[str, list[str]]
) -> Candidate:
    """Build a candidate; blocks that cross the units, or that are indexed one by one, get a single order."""
    clear = [outer for outer in blocks if all(place.axis_of(outer) is not None for place in places)]
    ways = [clear, *([outer] for outer in reversed(clear) if len(clear) > 1), *([()] if clear else [])]
    alike = len(clear) < len(blocks) or all(place.is_indexed for place in places)
    return Candidate(
        tuple(place.place for place in places),
        lambda: tuple(_way(tracer, places, way, aliases) for way in ways),
        alike,
    )


def _way(
    tracer: AxisTracer, places: Sequence[_Occurrence], blocks: Sequence[int], aliases: dict[str, list[str]]
) -> tuple[Group, ...]:
    """Build one group for each position of these blocks."""
    groups: list[Group] = []
    for block in every(*(range(tracer.labels.places((label,))) for label in blocks)):
        axes = [axis for place in places for axis in _axes(tracer, place, dict(zip(blocks, block, strict=True)))]
        tied = [replace(axis, name=alias, tied_to=axis.name) for axis in axes for alias in aliases.get(axis.name, [])]
        groups.append(Group(str(len(groups)), axes[0].size, (*axes, *tied)))
    return tuple(groups)


def _axes(tracer: AxisTracer, found: _Occurrence, block: Mapping[int, int]) -> list[Axis]:
    """Return the axes of the units at one position of each of some blocks."""
    space, (name, number) = tracer.labels, found.place
    size, inner = (
        space.places(part) for part in (found.product[found.index : found.index + 1], found.product[found.index + 1 :])
    )
    starts, outer = _parts(tracer, found.product[: found.index], block)
    others = []
    for axis in sorted({axis for outer in block if (axis := found.axis_of(outer)) not in (None, number)}):
        begins, length = _parts(
            tracer, found.terms[axis][0], {o: k for o, k in block.items() if found.axis_of(o) == axis}
        )
        others.append([(axis, begin, length) for begin in begins])
    return [
        Axis(name, number, size, found.role, found.offset + start * size * inner, outer, inner, within)
        for start in starts
        for within in every(*others)
    ]


def _parts(tracer: AxisTracer, product: Product, block: Mapping[int, int]) -> tuple[list[int], int]:
    """Return the starts of the ranges of a product at these positions of its labels, and their length."""
    starts, length = [0], tracer.labels.places(product)
    last = max((index for index, label in enumerate(product) if label in block), default=-1)
    for label in product[: last + 1]:
        size = tracer.labels.places((label,))
        length //= size
        chosen: Iterable[int] = [block[label]] if label in block else range(size)
        starts = [start + place * length for start in starts for place in chosen]
    return starts, length


def name_groups(groups: Iterable[Group]) -> list[Group]:
    """Name the groups after the first tensor that produces their units."""
    found: dict[str, Group] = {}
    for group in groups:
        first = next((axis for axis in group.axes if axis.role != "consumes"), group.axes[0])
        name = first.name.removesuffix(".weight").removesuffix(".bias")
        if first.inner > 1:
            name += f" in blocks of {first.inner}"
        if first.within:
            name += " at " + ", ".join(str(start) for _, start, _ in first.within)
        if first.offset or first.outer > 1 or name in found:
            name += f" from {first.offset}"
        while name in found:
            name += "'"
        found[name] = replace(group, name=name)
    return list(found.values())


def find_fixed_axes(tracer: AxisTracer, groups: Iterable[Group], refused: Mapping[TensorAxis, str]) -> list[Fixed]:
    """Return all axes that are not, or only partly, covered by groups, with reasons."""
    covered: dict[TensorAxis, set[int]] = {}
    for group in groups:
        for axis in group.axes:
            places = range(axis.offset, axis.offset + axis.length)
            covered.setdefault((axis.name, axis.axis), set()).update(places)
    found = []
    for name, value in tracer.tensors.items():
        for number, term in enumerate(value.terms):
            place, normal = (name, number), tracer.labels.expand(term)
            reasons = [[tracer.labels.reason(label) for label in product] for product in normal]
            over = next((why for each in reasons for k, why in enumerate(each) if why and None in each[k:]), None)
            if len(covered.get(place, ())) < tracer.labels.size(term) > 1 or place in refused or over:
                fixed = next((why for each in reasons for why in each if why), "a part of it is a single place")
                found.append(Fixed(name, number, refused.get(place) or over or fixed))
    return found
