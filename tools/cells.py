"""Cells and tables in Markdown, for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]  # of a file in results/


def table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown with all columns but the first ones to the right."""
    rule = [*["---"] * left, *["---:"] * (len(lines[0]) - left)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def spread(found: Content | None, scale: float, digits: int) -> str:
    """Mean and standard deviation; a dash for what is missing."""
    if found is None:
        return "-"
    around = "" if found["std"] is None else f" ± {scale * found['std']:.{digits}f}"
    return f"{scale * found['mean']:.{digits}f}{around}"
