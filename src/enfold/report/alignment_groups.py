"""Units in figures of alignment: groups of one layer form a kind with a readable name, of which some are selected."""

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
    """Groups of one layer with the same form, such as the units of each of its heads."""

    layer: str
    places: int  # size of a block if blocks are the units, else 0
    units: int  # of each group
    groups: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if the kind consists of all units of a layer, not of blocks or of units inside them."""
        return not self.places and len(self.groups) == 1

    @property
    def name(self) -> str:
        """The name of the layer, and the size of its blocks."""
        return short(layer_name(self.layer)) + (f", blocks of {self.places}" if self.places else "")

    def mean(self, values: Mapping[str, float]) -> float:
        """Return the mean over the groups."""
        return sum(values[name] for name in self.groups) / len(self.groups)

    def __str__(self) -> str:
        times = f"{len(self.groups)} × " if len(self.groups) > 1 else ""
        return f"{self.name} ({times}{self.units})"


def kinds_of(units: Mapping[str, int]) -> list[Kind]:
    """Return groups, given with their numbers of units (0 for all), as kinds in the order of the network."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for name, number in units.items():
        parts = GROUP.fullmatch(name)
        layer, places = (parts["layer"], parts["places"]) if parts else (name, None)
        found.setdefault((layer, int(places or 0), number), []).append(name)
    return [Kind(*key, tuple(names)) for key, names in found.items()]


def select_kinds(kinds: Sequence[Kind], most: int) -> list[Kind]:
    """Return at most `most` kinds, complete layers first, evenly from the first to the last."""
    if len(kinds) <= most:
        return list(kinds)
    return select_evenly([kind for kind in kinds if kind.is_complete] or kinds, most)


def select_evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """Return at most `most` things, evenly from the first to the last."""
    if len(things) <= most:
        return list(things)
    steps = max(most - 1, 1)
    return [things[round(step * (len(things) - 1) / steps)] for step in range(most)]


def describe_omitted(kinds: Sequence[Kind], shown: Sequence[Kind], file: str) -> str:
    """Return a note on the kinds that are not shown and the file that contains them; empty if all are shown."""
    missing = [kind for kind in kinds if kind not in shown]
    complete = sum(kind.is_complete for kind in missing)
    parts = len(missing) - complete
    words = [f"{complete} layer{'s' * (complete > 1)} between these"] if complete else []
    words += [f"{parts} kind{'s' * (parts > 1)} of blocks and of units inside them"] if parts else []
    text = " and ".join(words)
    return f"omitted: {text}, all in {file}" if missing else ""


def layer_name(name: str) -> str:
    """Return a readable name; layers of a Sequential have numbers as names."""
    return f"layer {name}" if name[:1].isdigit() else name


def short(name: str) -> str:
    """Return the end of a long name."""
    end = name[-LONGEST:]
    return name if end == name else f"…{end[end.find('.') + 1 :]}"
