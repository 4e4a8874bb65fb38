"""The theory of averaging in a report: the scores of `enfold evaluate RUN --theory`, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from enfold.errors import EnfoldError
from enfold.metrics.theory_scores import CLASSES, NUMBERS
from enfold.report.blocks import Block, Item, Table
from enfold.report.content import Content

FILE = "theory.json"
CAPTION = (
    "Test data, ± standard deviation over seeds. The vote of independent members is what the members would reach if "
    "their errors were independent. Jensen's gap is the mean member's NLL minus the ensemble's; the bound of Masegosa, "
    "the mean member's NLL minus a variance, is at least the ensemble's NLL. The rank-one defect is 0 for members that "
    "form a BatchEnsemble."
)


def theory_table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the scores by model and name."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return ["model", *map(_title, names)], [
        [label, *(_cell(name, row.get(name)) for name in names)] for label, row in rows.items()
    ]


def theory_blocks(content: Content) -> list[Block]:
    """Return the table of a run for which `enfold evaluate --theory` was called."""
    file = content.folder / FILE
    if not file.is_file():
        return []
    try:
        header, cells = theory_table(json.loads(file.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnfoldError(
            f"'{file}' must be written by enfold, but it cannot be read ({type(error).__name__}: {error}): run "
            "enfold evaluate RUN --theory again"
        ) from error
    return [Table(CAPTION, tuple(header), tuple(tuple(map(Item, row)) for row in cells))] if cells else []


def _title(name: str) -> str:
    metric = (CLASSES | NUMBERS).get(name)
    unit = "" if metric is None or not metric.unit else f" ({metric.unit})"
    return name.replace("_", " ") + unit


def _cell(name: str, value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    metric = (CLASSES | NUMBERS).get(name)
    scale = 1.0 if metric is None else metric.scale
    spread = "" if value["std"] is None else f" ± {scale * value['std']:.2g}"
    return f"{scale * value['mean']:.4g}{spread}"
