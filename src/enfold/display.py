"""Results in notebooks: tables as HTML, and axes of matplotlib to draw on."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from enfold.errors import MissingExtra

# A palette for all kinds of colour vision (M. Okabe and K. Ito, 2008).
MEMBER, ENSEMBLE, EFFICIENT, NETWORK, CONTROL = "#CC79A7", "#0072B2", "#009E73", "#D55E00", "#777777"


def html_table(
    header: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "", chosen: Sequence[int] = ()
) -> str:
    """Return a table as HTML; all texts are escaped.

    Args:
        header: The names of the columns.
        rows: The cells of each row.
        caption: A line above the table.
        chosen: The indices of rows that are emphasized.
    """

    def line(cells: Sequence[object], tag: str, kind: str = "") -> str:
        return f"<tr{kind}>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    marks = dict.fromkeys(chosen, " class='chosen' style='font-weight:600'")
    body = "".join(line(cells, "td", marks.get(index, "")) for index, cells in enumerate(rows))
    return f"<table>{above}<thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def text_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as lines of text: the first column to the left, the others to the right."""
    table = [[str(cell) for cell in cells] for cells in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def format_bytes(size: float) -> str:
    """Return a size in bytes as text."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def format_count(number: float) -> str:
    """Return a number of parameters or operations as text."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f}"


def axes_or_new(axes: Any = None) -> Any:
    """Return axes of matplotlib to draw on: the given ones, or those of a new figure.

    Raises:
        MissingExtra: If matplotlib is missing.
    """
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "a plot") from error
    _, axes = pyplot.subplots(figsize=(6.0, 3.6), layout="constrained")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    return axes
