"""Analyses of a run as trees of numbers, seed by seed, so that claims can be made of what they find."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.registry import suggest
from enfold.run import alignment, landscape
from enfold.run.recipe import as_tuple
from enfold.run.seed_run import SeedRun

Tree = dict[str, Any]
HOURS = 24 * 60.0  # minutes that a landscape may take: who reproduces it wants all of it


def home(name: str, run: SeedRun, out: Path | None = None) -> Path:
    """The folder of an analysis: with its seed, unless it is to be elsewhere; one that holds another seed's is refused.

    A run of one seed is its own seed's folder.
    """
    folder = run.run.path / name if out is None else out
    if folder.exists() and not folder.is_dir():
        raise EnfoldError(f"an analysis needs a folder, got the file '{folder}': choose another --out")
    others = sorted(_seeds_in(folder) - {run.seed})
    if others:
        raise EnfoldError(
            f"a folder holds the {name} of one seed, but '{folder}' has that of seed {others[0]}, got seed "
            f"{run.seed}: choose another --out, or leave it out"
        )
    return folder


def _seeds_in(folder: Path) -> set[int]:
    """Of the parts that lie there; files that are none, or are damaged, are not asked here."""
    found = set()
    for file in folder.glob("*.json"):
        try:
            found.add(json.loads(file.read_text(encoding="utf-8"))["settings"]["seed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {seed for seed in found if isinstance(seed, int)}


def analyse(name: str, run: SeedRun, settings: Mapping[str, Any]) -> Tree:
    """What the analysis found of one seed, kept in a folder of its name; what is there is not computed again."""
    if name not in ANALYSES:
        raise EnfoldError(f"an analysis must be one of {', '.join(ANALYSES)}, got '{name}'{suggest(name, ANALYSES)}")
    return ANALYSES[name](run, home(name, run), {key: as_tuple(value) for key, value in settings.items()})


def draw(name: str, run: SeedRun, found: Tree) -> list[Path]:
    """The figures of what was found, as SVG."""
    folder = home(name, run)
    if name == "landscape":
        from enfold.report.landscape import landscape_figures

        written = landscape_figures(landscape.stored_parts(folder), folder)
    else:
        from enfold.report.alignment import alignment_figures

        written = alignment_figures(found, alignment.stored_matrices(folder), folder)
    return [path for path in written if path.suffix == ".svg"]


def _alignment(run: SeedRun, folder: Path, settings: dict[str, Any]) -> Tree:
    """`epochs` and `change` are of permAVG, all others of `alignment.Asked`."""
    own = {key: settings.pop(key, None) for key in ("epochs", "change")}
    changes = [f"{key}={value}" for key, value in (own["change"] or {}).items()]
    fold = alignment.permutation_options(run, 1.0, own["epochs"], changes)
    return alignment.study(run, folder, alignment.Asked(**settings), fold)


def _landscape(run: SeedRun, folder: Path, settings: dict[str, Any]) -> Tree:
    landscape.study(run, folder, landscape.Asked(**{"minutes": HOURS, **settings}))
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


ANALYSES: dict[str, Callable[[SeedRun, Path, dict[str, Any]], Tree]] = {
    "alignment": _alignment,
    "landscape": _landscape,
}
