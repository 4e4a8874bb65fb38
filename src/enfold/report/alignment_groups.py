"""Units in figures of alignment: groups of one layer as one kind, with a name that fits, and kinds that tell most."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LONGEST = 40  # letters of a layer's name in a figure
GROUP = re.compile(r"(?P<layer>.*?)(?: in blocks of (?P<places>\d+))?(?: from \d+)?'*")

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Kind:
    """Groups of one layer that are alike, such as the units inside each of its heads."""

    layer: str
    places: int  # of a block, where blocks are the units; else 0
    units: int  # of each group
    groups: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of a layer unit by unit, not blocks or what is inside them."""
        return not self.places and len(self.groups) == 1

    @property
    def name(self) -> str:
        """The layer, and that it is about blocks."""
        return short(layer_name(self.layer)) + (f", blocks of {self.places}" if self.places else "")

    def mean(self, values: Mapping[str, float]) -> float:
        """Over its groups."""
        return sum(values[name] for name in self.groups) / len(self.groups)

    def __str__(self) -> str:
        times = f"{len(self.groups)} × " if len(self.groups) > 1 else ""
        return f"{self.name} ({times}{self.units})"


def kinds_of(units: Mapping[str, int]) -> list[Kind]:
    """Groups, given with their numbers of units (or 0 for all), as kinds in the order of the network."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for name, number in units.items():
        parts = GROUP.fullmatch(name)
        layer, places = (parts["layer"], parts["places"]) if parts else (name, None)
        found.setdefault((layer, int(places or 0), number), []).append(name)
    return [Kind(*key, tuple(names)) for key, names in found.items()]


def telling(kinds: Sequence[Kind], most: int) -> list[Kind]:
    """So many at most: of too many, those of whole layers, evenly from the first to the last."""
    if len(kinds) <= most:
        return list(kinds)
    return evenly([kind for kind in kinds if kind.whole] or kinds, most)


def evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """So many at most, from the first to the last."""
    if len(things) <= most:
        return list(things)
    steps = max(most - 1, 1)
    return [things[round(step * (len(things) - 1) / steps)] for step in range(most)]


def left_out(kinds: Sequence[Kind], shown: Sequence[Kind], file: str) -> str:
    """Which of them are not shown, and where they are; nothing if all are."""
    missing = [kind for kind in kinds if kind not in shown]
    whole = sum(kind.whole for kind in missing)
    parts = len(missing) - whole
    words = [f"{whole} layer{'s' * (whole > 1)} between these"] if whole else []
    words += [f"{parts} kind{'s' * (parts > 1)} of blocks and of units inside them"] if parts else []
    told = " and ".join(words)
    return f"left out: {told}, all in {file}" if missing else ""


def layer_name(name: str) -> str:
    """As people say it: layers of a Sequential have numbers for names."""
    return f"layer {name}" if name[:1].isdigit() else name


def short(name: str) -> str:
    """Of a long name, its end."""
    end = name[-LONGEST:]
    return name if end == name else f"…{end[end.find('.') + 1 :]}"
