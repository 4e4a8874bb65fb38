"""Groups of axes: which places of which tensors are permuted together without changing what a network computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Role = Literal["produces", "consumes", "meets", "both"]
ARROWS: dict[Role, str] = {"produces": "->", "consumes": "<-", "meets": "<>", "both": "->"}


@dataclass(frozen=True)
class Axis:
    """Units along one axis of a tensor: from `offset` on, the axis is outer x units x inner places.

    After a flatten, `inner` is the number of places of one channel. Units of one expert of many lie `within` a part of
    the other axes. An axis that produces units is multiplied by P, one that consumes them by P^-1, and so is one whose
    units meet theirs in a product, as keys meet queries; one of a tied tensor may do both.
    """

    name: str  # in the network's state
    axis: int
    size: int  # units
    role: Role = "produces"
    offset: int = 0
    outer: int = 1
    inner: int = 1
    within: tuple[tuple[int, int, int], ...] = ()  # (axis, start, length): of other axes, these places only
    tied_to: str | None = None  # the first name of the same tensor; a state may hold one of them or both

    @property
    def length(self) -> int:
        """How many places of the axis belong to the units."""
        return self.outer * self.size * self.inner

    @property
    def divided(self) -> bool:
        """Whether it is P^-1 that the axis is multiplied by."""
        return self.role in ("consumes", "meets")

    def span(self, axis: int) -> tuple[int, int] | None:
        """The start and the length of what belongs to the units along an axis of the tensor; None if it is all."""
        if axis == self.axis:
            return self.offset, self.length
        return next(((start, length) for other, start, length in self.within if other == axis), None)

    def by_unit(self, tensor: Tensor) -> Tensor:
        """(units, everything else)."""
        return self.units_first(tensor).flatten(1)

    def units_first(self, tensor: Tensor) -> Tensor:
        """(units, outer, inner, *the other axes), a view."""
        part = tensor.narrow(self.axis, self.offset, self.length)
        for axis, start, length in self.within:
            part = part.narrow(axis, start, length)
        units: Tensor = part.unflatten(self.axis, (self.outer, self.size, self.inner))
        return units.movedim((self.axis + 1, self.axis, self.axis + 2), (0, 1, 2))

    def with_units(self, tensor: Tensor, units: Tensor) -> Tensor:
        """The tensor with other values at its units, given as `units_first` gives them."""
        if self.within:
            (axis, start, length), *rest = self.within
            part = replace(self, within=tuple(rest)).with_units(tensor.narrow(axis, start, length), units)
            return tensor.slice_scatter(part, axis, start, start + length)
        part = units.movedim((0, 1, 2), (self.axis + 1, self.axis, self.axis + 2)).flatten(self.axis, self.axis + 2)
        if self.length == tensor.shape[self.axis]:
            return part
        return tensor.slice_scatter(part, self.axis, self.offset, self.offset + self.length)

    def __str__(self) -> str:
        where = f"{self.name}[{self.axis}]"
        if self.offset or self.outer > 1:
            where += f" from {self.offset}"
        if self.outer > 1:
            where += f", {self.outer} times"
        for axis, start, length in self.within:
            where += f" at {start}" + (f" to {start + length - 1}" if length > 1 else "") + f" of [{axis}]"
        return where + (f", {self.inner} places each" if self.inner > 1 else "")


@dataclass(frozen=True)
class Group:
    """Units that may be put in any order, if it is done along all these axes."""

    name: str
    size: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Fixed:
    """An axis of a tensor whose places, or some of them, may not be permuted, or only in blocks alike, and why."""

    name: str
    axis: int
    reason: str


@dataclass(frozen=True)
class Symmetry:
    """What may be permuted in a network, and what may not; printed as a table."""

    groups: tuple[Group, ...]
    fixed: tuple[Fixed, ...]
    note: str = ""  # what keeps the whole network from being looked at
    deciding: tuple[str, ...] = ()  # modules that decide by values

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def decided(self, module: str) -> bool:
        """Whether a module lies inside one that decides by values: what it is called with may be chosen."""
        return any(not name or f"{module}.".startswith(f"{name}.") for name in self.deciding)

    def table(self) -> str:
        """Groups with their sizes and axes, then what is fixed and why."""
        rows = [["group", "units", "axes"]]
        for group in self.groups:
            axes = [f"{axis} {ARROWS[axis.role]}" for axis in group.axes if not axis.tied_to]
            rows += [[group.name, str(group.size), axes[0]], *(["", "", axis] for axis in axes[1:])]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2]}" for row in rows]
        reasons: dict[str, list[str]] = {}
        for one in self.fixed:
            reasons.setdefault(one.reason, []).append(f"{one.name}[{one.axis}]")
        lines += [f"fixed, because {reason}: {', '.join(names)}" for reason, names in reasons.items()]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def __str__(self) -> str:
        return self.table()
