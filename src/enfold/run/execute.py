"""Execute: a recipe's cells one after the other, each resumable, then the summary over seeds."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.run.directory import RunDirectory
from enfold.run.recipe import Recipe, make_recipe
from enfold.run.results import Results, evaluate_cell, summarise
from enfold.run.stages import Cell
from enfold.store import versions


def cells(run: RunDirectory, recipe: Recipe, device: str = "cpu") -> list[Cell]:
    """One cell a seed: in the run itself if there is one seed, else in a folder each."""
    if len(recipe.seeds) == 1:
        return [Cell(run, recipe, recipe.seeds[0], device)]
    return [Cell(run.cell(seed), recipe, seed, device) for seed in recipe.seeds]


def cell_of(run: RunDirectory, recipe: Recipe, seed: int | None, device: str = "cpu") -> Cell:
    """The cell of that seed, or the first."""
    for cell in cells(run, recipe, device):
        if seed in (None, cell.seed):
            return cell
    known = ", ".join(map(str, recipe.seeds))
    raise EnfoldError(
        f"the seed must be one of the run's, {known}, got {seed}: choose one of them, or leave --seed out"
    )


def execute(run: RunDirectory, recipe: Recipe, *, device: str = "cpu", train_only: bool = False) -> dict[str, Any]:
    """Everything that is still to do, and the summary; with `train_only` the members alone."""
    results: list[Results] = []
    for cell in cells(run, recipe, device):
        if train_only:
            cell.members()
        else:
            results.append(evaluate_cell(cell, cell.models()))
    if train_only:
        return {}
    summary = {
        "name": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(recipe.seeds),
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "rows": summarise(results),
    }
    run.write_json("summary.json", summary)
    return summary


def add_method(run: RunDirectory, room: str, spec: dict[str, Any]) -> Recipe:
    """The run's recipe with one more share or fold, checked and written; a label that is there already is refused."""
    key = f"{room}s"
    recipe = run.recipe()
    content = recipe.model_dump(mode="json")
    added = getattr(make_recipe({**content, "shares": [], "folds": [], key: [spec]}, "the command line"), key)[0]
    known = [each for each in (*recipe.shares, *recipe.folds) if each.label == added.label]
    if known and known[0] != added:
        labels = [each.label for each in (*recipe.shares, *recipe.folds)]
        free = next(name for number in count(2) if (name := f"{added.label}-{number}") not in labels)
        raise EnfoldError(
            f"every share and fold of a run must have its own label, got '{added.label}' again, changed, beside "
            f"{', '.join(labels)}: add --label {free}"
        )
    if known:
        return recipe
    cell = cells(run, recipe)[0]
    cell.check_share(added) if room == "share" else cell.check_fold(added)
    extended = make_recipe({**content, key: [*content[key], spec]}, str(run.recipe_file))
    run.write_recipe(extended)
    return extended


def open_run(path: Path) -> tuple[RunDirectory, Recipe]:
    """An existing run whose members are trained, and its recipe."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    for cell in cells(run, recipe):
        if not cell.run.is_done("members", "members"):
            raise EnfoldError(
                f"a run must have trained members to go on from, but '{cell.run.path}' has none: "
                "finish it with  enfold run RECIPE OUT --resume"
            )
    return run, recipe
