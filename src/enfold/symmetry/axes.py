"""Groups of parameter axes that are permuted together, and the symmetry of a network as a list of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Role = Literal["produces", "consumes", "meets", "both"]
ARROWS: dict[Role, str] = {"produces": "->", "consumes": "<-", "meets": "<>", "both": "->"}


@dataclass(frozen=True)
class Axis:
    """Units along one axis of a tensor: from `offset` on, the axis has the structure outer x units x inner.

    After a flatten, `inner` is the number of positions of one channel. If the units belong to one expert of several,
    they are `within` a range of other axes. An axis that produces units is multiplied by P, one that consumes them by
    P^-1, and so is one that is contracted with them ("meets", as keys with queries); an axis of a tied tensor may do
    both.

    Args:
        name: Name of the tensor in the state dict.
        axis: Index of the axis.
        size: Number of units.
        role: "produces", "consumes", "meets" or "both".
        offset: First index of the units along the axis.
        outer: Repetitions of the units.
        inner: Consecutive indices that belong to one unit.
        within: (axis, start, length) of ranges of other axes that the units are limited to.
        tied_to: First name of the same tensor, if it is tied.
    """

    name: str
    axis: int
    size: int
    role: Role = "produces"
    offset: int = 0
    outer: int = 1
    inner: int = 1
    within: tuple[tuple[int, int, int], ...] = ()
    tied_to: str | None = None

    @property
    def length(self) -> int:
        """Number of indices along the axis that belong to the units."""
        return self.outer * self.size * self.inner

    @property
    def divided(self) -> bool:
        """True if the axis is multiplied by P^-1."""
        return self.role in ("consumes", "meets")

    def span(self, axis: int) -> tuple[int, int] | None:
        """Return start and length of the units' range along an axis of the tensor; None if it is the complete axis."""
        if axis == self.axis:
            return self.offset, self.length
        return next(((start, length) for other, start, length in self.within if other == axis), None)

    def by_unit(self, tensor: Tensor) -> Tensor:
        """Return the tensor as (units, remaining entries)."""
        return self.units_first(tensor).flatten(1)

    def units_first(self, tensor: Tensor) -> Tensor:
        """Return a view of shape (units, outer, inner, *other axes)."""
        part = tensor.narrow(self.axis, self.offset, self.length)
        for axis, start, length in self.within:
            part = part.narrow(axis, start, length)
        units: Tensor = part.unflatten(self.axis, (self.outer, self.size, self.inner))
        return units.movedim((self.axis + 1, self.axis, self.axis + 2), (0, 1, 2))

    def with_units(self, tensor: Tensor, units: Tensor) -> Tensor:
        """Return a copy of the tensor with other values for the units, given in the layout of `units_first`."""
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
    """Units that can be permuted in any order, if the same permutation is applied along all these axes.

    Args:
        name: Name of the group, after the first tensor that produces its units.
        size: Number of units.
        axes: The axes of the units.
    """

    name: str
    size: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Fixed:
    """An axis that cannot be permuted, completely or in part.

    Args:
        name: Name of the tensor.
        axis: Index of the axis.
        reason: Why it is fixed.
    """

    name: str
    axis: int
    reason: str


@dataclass(frozen=True)
class Symmetry:
    """The permutation groups of a network and its fixed axes; `print` shows them as a table.

    Args:
        groups: The verified groups; also available by iteration and by name.
        fixed: Axes that cannot be permuted, with reasons.
        note: Why parts of the network could not be analysed; empty if all could.
        deciding: Names of modules whose control flow depends on values.
    """

    groups: tuple[Group, ...]
    fixed: tuple[Fixed, ...]
    note: str = ""
    deciding: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def depends_on_values(self, module: str) -> bool:
        """Return whether a module is inside one whose control flow depends on values."""
        return any(not name or f"{module}.".startswith(f"{name}.") for name in self.deciding)

    def table(self) -> str:
        """Return the groups with sizes and axes, followed by the fixed axes with reasons, as text."""
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
