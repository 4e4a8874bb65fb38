"""Execute: a recipe's cells one after the other, each resumable, then the summary over seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, WriteError
from enfold.metrics import accuracy, nll, per_member
from enfold.registry import nearest
from enfold.run.directory import RunDirectory
from enfold.run.recipe import Recipe, make_recipe
from enfold.run.results import Results, evaluate_cell, forget, predictions_of, summarise
from enfold.run.specs import FoldSpec, ShareSpec
from enfold.run.stages import Cell
from enfold.saving import read_manifest, versions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _writes(
    function: Callable[Concatenate[RunDirectory, Arguments], Result],
) -> Callable[Concatenate[RunDirectory, Arguments], Result]:
    """A function that writes to the run which is its first argument, with the run's lock."""

    @wraps(function)
    def locked(run: RunDirectory, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with run.writing():
            return function(run, *args, **kwargs)

    return locked


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


@_writes
def execute(
    run: RunDirectory, recipe: Recipe, *, device: str = "cpu", only: Collection[str] | None = None
) -> dict[str, Any]:
    """Everything that is still to do, and the summary.

    With `only`, of the shares and folds these are made, with their controls, and others are evaluated if they are
    there for all of their seeds.
    """
    parts = cells(run, recipe, device)
    made = None if only is None else {*only, *(recipe.controlled().get(label) for label in only)}
    left = () if made is None else [label for label in unfinished(run, recipe) if label not in made]
    return _summarised(run, recipe, [evaluate_cell(cell, cell.models(without=left)) for cell in parts])


@_writes
def train(run: RunDirectory, recipe: Recipe, *, device: str = "cpu") -> None:
    """The members alone."""
    for cell in cells(run, recipe, device):
        cell.members()


@_writes
def brought(run: RunDirectory, recipe: Recipe, *, device: str = "cpu") -> dict[str, Any]:
    """The files of a run whose members came from files, with each one's scores on validation data, and those left out.

    A member that saw its inputs in another form where it was trained is told by its scores.
    """
    cell = cells(run, recipe, device)[0]
    if recipe.checkpoints is None:
        return {}
    about = read_manifest(cell.run.model_file("members", "members"))["about"]
    said = predictions_of(cell, "ensemble", cell.members())["validation"]
    scores = [per_member(metric, said).tolist() for metric in (accuracy, nll)]
    files = [
        {"member": index, "file": file, "accuracy": right, "nll": loss}
        for index, (file, right, loss) in enumerate(zip(about.get("files", ()), *scores, strict=False))
    ]
    return {"files": files, "left_out": about.get("left_out", [])}


def unfinished(run: RunDirectory, recipe: Recipe) -> list[str]:
    """The shares, controls and folds that are asked for and not made yet for all of their seeds."""
    stages = [(cell, kind, label) for cell in cells(run, recipe) for kind, label in cell.wanted()]
    return list(dict.fromkeys(label for cell, kind, label in stages if not cell.is_done(kind, label)))


def _summarised(run: RunDirectory, recipe: Recipe, results: list[Results]) -> dict[str, Any]:
    summary = {
        "name": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(recipe.seeds),
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "controls": recipe.controlled(),
        "rows": summarise(results),
    }
    run.write_json("summary.json", summary)
    return summary


@_writes
def add_method(run: RunDirectory, room: str, spec: dict[str, Any], *, device: str = "cpu") -> Recipe:
    """The run's recipe with one more share or fold, which is made and asked for its predictions.

    One that fails leaves the run without it; one that was interrupted goes on. Before it is made for any seed, another
    may take its label.
    """
    key, recipe = f"{room}s", run.recipe()
    alone = {**recipe.model_dump(mode="json"), "shares": [], "folds": [], "control_names": {}, key: [spec]}
    added: ShareSpec | FoldSpec = getattr(make_recipe(alone, "the command line"), key)[0]
    without, extended = _without(recipe, added.label), recipe
    if added not in getattr(recipe, key):
        _require_free(run, recipe, added.label)
        content = without.model_dump(mode="json")
        extended = make_recipe({**content, key: [*content[key], spec]}, str(run.recipe_file))
        run.require_trust(extended)
    parts = [cell for cell in cells(run, extended, device) if (key, added.label) in cell.wanted()]
    if extended is recipe and all(cell.is_done(key, added.label) for cell in parts):
        return recipe
    _check(parts[0], added)
    parts[0].members()  # these and the data are not the method's: they are refused before anything is written
    for cell in parts:
        if cell.run.is_done(key, added.label):  # as of a run that was stopped, or that lost its place in the recipe
            cell.require_same(key, added.label)
    _rewrite(run, recipe, extended)
    for cell in parts:
        members = cell.members()
        try:
            predictions_of(cell, added.label, _made(cell, added, members))
        except WriteError:  # the method is not to blame: it goes on when there is room again
            raise
        except EnfoldError:
            _rewrite(run, extended, without)
            raise
    return extended


@_writes
def drop_method(run: RunDirectory, label: str) -> dict[str, Any] | None:
    """Remove a share or fold, and its control if it is no other's; the summary without it, if there was one.

    Stopped half-way, it has left the method unfinished, and can be done again.
    """
    recipe = run.recipe()
    known = [each.label for each in (*recipe.shares, *recipe.folds)]
    if label not in known:
        of = [fold for fold, control in recipe.controlled().items() if control == label]
        instead = f", which is the control of {', '.join(of)}: drop that" if of else nearest(label, known)
        raise EnfoldError(
            f"what can be dropped is one of the run's shares and folds, {', '.join(known) or 'of which it has none'}, "
            f"got '{label}'{instead or ': correct the label'}"
        )
    without, named = _without(recipe, label), recipe.controlled()
    renumbered = {fold: named[fold] for fold, control in without.controlled().items() if control != named[fold]}
    without = without.model_copy(update={"control_names": {**without.control_names, **renumbered}})
    (run.path / "summary.json").unlink(missing_ok=True)  # until it is written anew, reports read each seed's results
    _rewrite(run, recipe, without)
    parts = [cell.run for cell in cells(run, without)]
    if not all((part.path / "results.json").is_file() for part in parts):
        return None
    return _summarised(run, without, [part.read_json("results.json")["rows"] for part in parts])


def _require_free(run: RunDirectory, recipe: Recipe, label: str) -> None:
    """No share or fold that is made already has this label."""
    stages = [(cell, kind) for cell in cells(run, recipe) for kind, name in cell.wanted() if name == label]
    if any(cell.run.is_done(kind, label) for cell, kind in stages):
        labels = [each.label for each in (*recipe.shares, *recipe.folds)]
        free = next(name for number in count(2) if (name := f"{label}-{number}") not in labels)
        raise EnfoldError(
            f"every share and fold of a run must have its own label, got '{label}' again, changed, beside "
            f"{', '.join(labels)}: add --label {free}"
        )


def _without(recipe: Recipe, label: str) -> Recipe:
    others: dict[str, Any] = {
        key: tuple(each for each in getattr(recipe, key) if each.label != label) for key in ("shares", "folds")
    }
    others["control_names"] = {fold: name for fold, name in recipe.control_names.items() if fold != label}
    return recipe.model_copy(update=others)


def _rewrite(run: RunDirectory, before: Recipe, after: Recipe) -> None:
    """Put one recipe in the place of another; what was made by the first and is not in the second is removed."""
    for old, new in zip(cells(run, before), cells(run, after), strict=True):
        kept = new.wanted()
        for stage, spec in old.wanted().items():
            if kept.get(stage) != spec:  # also a control that has another's number now
                forget(old, *stage)
    run.write_recipe(after)


def _check(cell: Cell, spec: ShareSpec | FoldSpec) -> None:
    cell.check_share(spec) if isinstance(spec, ShareSpec) else cell.check_fold(spec)


def _made(cell: Cell, spec: ShareSpec | FoldSpec, members: DeepEnsemble) -> nn.Module:
    return cell.share(spec, members) if isinstance(spec, ShareSpec) else cell.fold(spec, members)


def open_run(path: Path, *, trust_code: bool = False) -> tuple[RunDirectory, Recipe]:
    """An existing run whose members are trained, and its recipe; one that names code must be trusted."""
    run = RunDirectory.open(path, trust_code=trust_code)
    run.prepare()
    recipe = run.recipe()
    run.require_trust(recipe)
    for cell in cells(run, recipe):
        if not cell.run.is_done("members", "members"):
            finish = recipe.command("run", run.recipe_file, run.path, "--resume")
            raise EnfoldError(
                f"a run must have trained members to go on from, but '{cell.run.path}' has none: finish with  {finish}"
            )
    return run, recipe
