"""Analyses of a run as trees of numbers, seed by seed, so that claims can be made of what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.registry import nearest
from enfold.run import alignment, landscape
from enfold.run.methods import as_tuples
from enfold.run.stages import Cell

Tree = dict[str, Any]
HOURS = 24 * 60.0  # minutes that a landscape may take: who reproduces it wants all of it


def analyse(name: str, cell: Cell, settings: Mapping[str, Any]) -> Tree:
    """What the analysis found of one seed, kept in a folder of its name; what is there is not computed again."""
    if name not in ANALYSES:
        raise EnfoldError(f"an analysis must be one of {', '.join(ANALYSES)}, got '{name}'{nearest(name, ANALYSES)}")
    return ANALYSES[name](cell, cell.run.path / name, {key: as_tuples(value) for key, value in settings.items()})


def draw(name: str, cell: Cell, found: Tree) -> list[Path]:
    """The figures of what was found, as SVG."""
    folder = cell.run.path / name
    if name == "landscape":
        from enfold.report.landscape import landscape_figures

        written = landscape_figures(landscape.stored_parts(folder), folder)
    else:
        from enfold.report.alignment import alignment_figures

        written = alignment_figures(found, alignment.stored_matrices(folder), folder)
    return [path for path in written if path.suffix == ".svg"]


def _alignment(cell: Cell, folder: Path, settings: dict[str, Any]) -> Tree:
    """`epochs` and `change` are of permAVG, all others of `alignment.Asked`."""
    own = {key: settings.pop(key, None) for key in ("epochs", "change")}
    changes = [f"{key}={value}" for key, value in (own["change"] or {}).items()]
    fold = alignment.chosen_fold(cell, 1.0, own["epochs"], changes)
    return alignment.study(cell, folder, alignment.Asked(**settings), fold)


def _landscape(cell: Cell, folder: Path, settings: dict[str, Any]) -> Tree:
    landscape.study(cell, folder, landscape.Asked(**{"minutes": HOURS, **settings}))
    parts = landscape.stored_parts(folder)
    return {name: {**content["facts"], **_nested(arrays)} for name, (content, arrays) in parts.items()}


def _nested(arrays: Mapping[str, Any]) -> Tree:
    """Arrays named "a/b" as trees with b under a."""
    tree: Tree = {}
    for name, tensor in arrays.items():
        *path, last = name.split("/")
        place = tree
        for word in path:
            place = place.setdefault(word, {})
        place[last] = tensor.tolist()
    return tree


ANALYSES: dict[str, Callable[[Cell, Path, dict[str, Any]], Tree]] = {"alignment": _alignment, "landscape": _landscape}
