"""The blocks of a page: plain values, which the template escapes and lays out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from enfold.report.content import Content


@dataclass(frozen=True)
class Figure:
    """A figure with caption and alt text: SVG as text, other formats as a data URL."""

    kind: ClassVar = "figure"
    title: str
    caption: str
    alt: str
    svg: str = ""
    picture: str = ""
    paper: bool = False  # has a white background in the dark theme too, for which its colours were chosen
    small: bool = False  # several in one line


@dataclass(frozen=True)
class Item:
    """A cell of a table."""

    text: str
    aside: str = ""  # a standard deviation, an interval or a ratio
    value: float | None = None  # the sort key
    mark: str = ""  # the kind of the model


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first item of each names the row."""

    kind: ClassVar = "table"
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Item, ...], ...]
    sortable: bool = False


@dataclass(frozen=True)
class Bar:
    """A probability of a class."""

    name: str
    percent: float
    right: bool


@dataclass(frozen=True)
class Card:
    """One example with the predictions of two models."""

    title: str
    truth: str
    alt: str
    picture: str
    predictions: tuple[tuple[str, tuple[Bar, ...]], ...]


@dataclass(frozen=True)
class Gallery:
    """Examples side by side."""

    kind: ClassVar = "gallery"
    caption: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Listing:
    """The text of a file, collapsed below its title."""

    kind: ClassVar = "listing"
    title: str
    text: str


@dataclass(frozen=True)
class Notes:
    """Short remarks, each with its subject."""

    kind: ClassVar = "notes"
    notes: tuple[tuple[str, str], ...]


Block = Figure | Table | Gallery | Listing | Notes


@dataclass(frozen=True)
class Section:
    """A section of the page: the blocks of each run by name; an empty name stands for all runs."""

    key: str
    title: str
    intro: str
    runs: tuple[tuple[str, tuple[Block, ...]], ...]


Builder = Callable[[Sequence[Content]], Section | None]


def section_per_run(key: str, title: str, intro: str, blocks: Callable[[Content], Sequence[Block]]) -> Builder:
    """Return a builder of a section with the blocks of each run, or of None if no run has any.

    Args:
        key: The id of the section.
        title: The title.
        intro: The text below the title.
        blocks: Returns the blocks of one run.
    """

    def build(contents: Sequence[Content]) -> Section | None:
        parts = [(content.name, tuple(blocks(content))) for content in contents]
        present = tuple((name, found) for name, found in parts if found)
        return Section(key, title, intro, present) if present else None

    return build
