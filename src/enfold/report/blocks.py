"""The blocks that a page is put together from: plain values, which the template escapes and lays out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from enfold.report.content import Content


@dataclass(frozen=True)
class Figure:
    """A picture with how to read it: SVG as text, or anything else as a data address."""

    kind: ClassVar = "figure"
    title: str
    caption: str
    alt: str
    svg: str = ""
    picture: str = ""
    paper: bool = False  # keeps a white ground in the dark theme, as its colours were chosen for one
    small: bool = False  # stands beside others


@dataclass(frozen=True)
class Item:
    """A cell of a table."""

    text: str
    aside: str = ""  # a spread or an interval
    value: float | None = None  # by which it is sorted
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
    """One example with what two models say of it."""

    title: str
    truth: str
    alt: str
    picture: str
    answers: tuple[tuple[str, tuple[Bar, ...]], ...]


@dataclass(frozen=True)
class Gallery:
    """Examples side by side."""

    kind: ClassVar = "gallery"
    caption: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Listing:
    """Text as it is in a file, folded away under its title."""

    kind: ClassVar = "listing"
    title: str
    text: str


@dataclass(frozen=True)
class Notes:
    """Short remarks, each with what it is about."""

    kind: ClassVar = "notes"
    notes: tuple[tuple[str, str], ...]


Block = Figure | Table | Gallery | Listing | Notes


@dataclass(frozen=True)
class Section:
    """A part of the page: for each run by name, its blocks; a name that is empty stands for all runs."""

    key: str
    title: str
    intro: str
    parts: tuple[tuple[str, tuple[Block, ...]], ...]


Builder = Callable[[Sequence[Content]], Section | None]


def of_each(key: str, title: str, intro: str, blocks: Callable[[Content], Sequence[Block]]) -> Builder:
    """A section of what `blocks` gives for each run; no section where it gives nothing for any."""

    def build(contents: Sequence[Content]) -> Section | None:
        parts = [(content.name, tuple(blocks(content))) for content in contents]
        kept = tuple((name, found) for name, found in parts if found)
        return Section(key, title, intro, kept) if kept else None

    return build
