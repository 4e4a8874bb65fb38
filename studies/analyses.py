"""Analyses of a run as trees of numbers, one for each seed, so that claims can refer to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.registry import suggest
from enfold.run.analyses import home
from enfold.run.recipe_checks import as_tuple
from enfold.run.seed_run import SeedRun
from studies.theory import theory_tree

Tree = dict[str, Any]
MINUTES = 24 * 60.0  # no limit in practice: a study needs every part of the landscape


def run_analysis(name: str, seed_run: SeedRun, settings: Mapping[str, Any]) -> Tree:
    """Return the results of an analysis for one seed; finished parts are read from its folder."""
    if name not in ANALYSES:
        raise EnfoldError(f"an analysis must be one of {', '.join(ANALYSES)}, got '{name}'{suggest(name, ANALYSES)}")
    values = {key: as_tuple(value) for key, value in settings.items()}
    return ANALYSES[name](seed_run, home(name, seed_run), values)


def draw_analysis(name: str, seed_run: SeedRun, results: Tree) -> list[Path]:
    """Draw the figures of an analysis and return the SVG files."""
    folder = home(name, seed_run)
    if name == "theory":
        return []
    if name == "landscape":
        from enfold.report.landscape import draw_landscape
        from enfold.run import landscape

        written = draw_landscape(landscape.stored_parts(folder), folder)
    else:
        from enfold.report.alignment import draw_alignment
        from enfold.run import alignment

        written = draw_alignment(results, alignment.stored_matrices(folder), folder)
    return [path for path in written if path.suffix == ".svg"]


def _alignment(seed_run: SeedRun, folder: Path, settings: dict[str, Any]) -> Tree:
    """Run the analysis; `epochs` and `change` are options of permAVG, all others of the analysis.

    With `sizes`, it is run for the first members of each number, below which its results are; the sweep for the first
    number only.
    """
    from enfold.run import alignment

    own = {key: settings.pop(key, None) for key in ("epochs", "change", "sizes")}
    changes = [f"{key}={value}" for key, value in (own["change"] or {}).items()]
    options = alignment.permutation_options(seed_run, 1.0, own["epochs"], changes)
    if own["sizes"] is None:
        return alignment.study(seed_run, folder, alignment.AlignmentOptions(**settings), options)
    found, chosen = {}, alignment.AlignmentOptions(**settings)
    for size in own["sizes"]:
        parts = tuple(part for part in chosen.only if part != "sweep" or size == own["sizes"][0])
        now = replace(chosen, members=size, only=parts)
        found[str(size)] = alignment.study(seed_run, folder / str(size), now, options)
    return found


def _landscape(seed_run: SeedRun, folder: Path, settings: dict[str, Any]) -> Tree:
    from enfold.run import landscape

    landscape.study(seed_run, folder, landscape.LandscapeOptions(**{"minutes": MINUTES, **settings}))
    parts = landscape.stored_parts(folder)
    return {name: {**content["facts"], **_nest(arrays)} for name, (content, arrays) in parts.items()}


def _theory(seed_run: SeedRun, folder: Path, settings: dict[str, Any]) -> Tree:
    return theory_tree(seed_run)


def _nest(arrays: Mapping[str, Any]) -> Tree:
    """Turn arrays named "a/b" into a tree with b under a."""
    tree: Tree = {}
    for name, tensor in arrays.items():
        *path, last = name.split("/")
        branch = tree
        for word in path:
            branch = branch.setdefault(word, {})
        branch[last] = tensor.tolist()
    return tree


ANALYSES: dict[str, Callable[[SeedRun, Path, dict[str, Any]], Tree]] = {
    "alignment": _alignment,
    "landscape": _landscape,
    "theory": _theory,
}
