"""Execute a recipe: the seeds one after the other, each resumable, then the summary over seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from enfold.errors import EnfoldError, WriteError
from enfold.io.usercode import reporting
from enfold.metrics import metrics_for, per_member
from enfold.registry import suggest
from enfold.run.directory import RunDirectory
from enfold.run.recipe import Recipe, make_recipe
from enfold.run.results import Results, evaluate_seed, predict_stored, remove_model, summarise
from enfold.run.seed_run import SeedRun
from enfold.saving import read_manifest, versions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _with_lock(
    function: Callable[Concatenate[RunDirectory, Arguments], Result],
) -> Callable[Concatenate[RunDirectory, Arguments], Result]:
    """Hold the lock of the run, the first argument, during the call of a function."""

    @wraps(function)
    def call(run: RunDirectory, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with run.writing():
            return function(run, *args, **kwargs)

    return call


def seed_runs(run: RunDirectory, recipe: Recipe, device: str = "cpu") -> list[SeedRun]:
    """Return the seeds of a run: in the run itself if there is one seed, else in a folder each."""
    if len(recipe.seeds) == 1:
        return [SeedRun(run, recipe, recipe.seeds[0], device)]
    return [SeedRun(run.of_seed(seed), recipe, seed, device) for seed in recipe.seeds]


def find_seed(run: RunDirectory, recipe: Recipe, seed: int | None, device: str = "cpu") -> SeedRun:
    """Return a seed of a run, or the first if `seed` is None.

    Args:
        run: The directory of the run.
        recipe: Its recipe.
        seed: The seed.
        device: The device of training and evaluation.

    Raises:
        EnfoldError: If the run does not have the seed.
    """
    for each in seed_runs(run, recipe, device):
        if seed in (None, each.seed):
            return each
    known = ", ".join(map(str, recipe.seeds))
    raise EnfoldError(f"--seed must be one of the run's seeds, {known}, got {seed}: choose one of them")


@_with_lock
def execute(
    run: RunDirectory, recipe: Recipe, *, device: str = "cpu", only: Collection[str] | None = None
) -> dict[str, Any]:
    """Carry out everything that is not done yet, and return the summary.

    Args:
        run: The directory of the run.
        recipe: Its recipe.
        device: The device of training and evaluation.
        only: Labels of the steps that are made, with their controls and the steps that they use; others are evaluated
            if they are done for all their seeds. None makes all.
    """
    made = None
    if only is not None:
        labels = recipe.closure(list(only))
        made = {*labels, *(recipe.find_controls().get(label) for label in labels)}
    left = () if made is None else [label for label in list_unfinished(run, recipe) if label not in made]
    results = []
    for each in seed_runs(run, recipe, device):
        models = each.models(without=left)
        with reporting("the evaluation"):
            results.append(evaluate_seed(each, models))
    return _write_summary(run, recipe, results)


@_with_lock
def train(run: RunDirectory, recipe: Recipe, *, device: str = "cpu") -> None:
    """Train the members only."""
    for each in seed_runs(run, recipe, device):
        each.require_same_code()
        each.members()


@_with_lock
def describe_checkpoints(run: RunDirectory, recipe: Recipe, *, device: str = "cpu") -> dict[str, Any]:
    """Return the files of members that came from checkpoints, with scores on validation data, and unused files.

    Low scores show a member that was trained on inputs of another form.
    """
    first = seed_runs(run, recipe, device)[0]
    if recipe.checkpoints is None:
        return {}
    about = read_manifest(first.run.model_file("members", "members"))["about"]
    predictions = predict_stored(first, "ensemble", first.members())["validation"]
    table = metrics_for(predictions)
    names = dict.fromkeys([predictions.score, predictions.criterion])
    scores = [per_member(table[name], predictions).tolist() for name in names]
    files = [
        {"member": index, "file": file, **dict(zip(names, values, strict=True))}
        for index, (file, *values) in enumerate(zip(about.get("files", ()), *scores, strict=False))
    ]
    return {"files": files, "left_out": about.get("left_out", [])}


def list_unfinished(run: RunDirectory, recipe: Recipe) -> list[str]:
    """Return the labels of steps and controls that are not done for all their seeds."""
    stages = [(each, kind, label) for each in seed_runs(run, recipe) for kind, label in each.list_models()]
    return list(dict.fromkeys(label for each, kind, label in stages if not each.is_done(kind, label)))


def _write_summary(run: RunDirectory, recipe: Recipe, results: list[Results]) -> dict[str, Any]:
    summary = {
        "name": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(recipe.seeds),
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "controls": recipe.find_controls(),
        "rows": summarise(results),
    }
    run.write_json("summary.json", summary)
    return summary


@_with_lock
def add_step(
    run: RunDirectory,
    spec: dict[str, Any],
    *,
    device: str = "cpu",
    overrides: Mapping[tuple[Any, ...], str] | None = None,
) -> Recipe:
    """Add a step to a run, make it and predict with it.

    A step that fails leaves the run without it; one that was interrupted continues. Until it is made for a seed,
    another step may take its label.

    Args:
        run: The directory of the run.
        spec: The step as in a recipe, with a label.
        device: The device of training.
        overrides: What of the step was given on the command line, by the path of its key, for errors.

    Returns:
        The recipe with the step.
    """
    recipe = run.recipe()
    content = recipe.model_dump(mode="json")
    others = [step for step in content["steps"] if step["label"] != spec["label"]]
    given = {("steps", len(others), *path): text for path, text in (overrides or {}).items()}
    with run.context():
        extended = make_recipe({**content, "steps": [*others, spec]}, "the command line", overrides=given)
    added = extended.steps[-1]
    run.require_trust(extended)
    for each in seed_runs(run, recipe, device):
        each.require_same_code()
    without = _without(recipe, added.label)
    if added in recipe.steps:
        extended = recipe
    else:
        _require_free(run, recipe, added.label)
    wanted = [each for each in seed_runs(run, extended, device) if ("steps", added.label) in each.list_models()]
    if extended is recipe and all(each.is_done("steps", added.label) for each in wanted):
        return recipe
    wanted[0].check_step(added)
    wanted[0].members()  # problems of members and data are not those of the step: refused before anything is written
    for each in wanted:
        if each.run.is_done("steps", added.label):  # left by a stopped run or an earlier recipe
            each.require_same("steps", added.label)
    _replace_recipe(run, recipe, extended)
    for each in wanted:
        members = each.members()
        try:
            model = each.step(added, members)
            with reporting(f"'{added.label}'"):
                predict_stored(each, added.label, each.predictor(added, model))
        except WriteError:  # not the fault of the step, which continues when there is space
            raise
        except EnfoldError:
            _replace_recipe(run, extended, without)
            raise
    return extended


@_with_lock
def drop_step(run: RunDirectory, label: str) -> dict[str, Any] | None:
    """Remove a step, and its control if no other step has it; return the new summary if there was one.

    If it is interrupted, the step is unfinished and can be dropped again.

    Raises:
        EnfoldError: If there is no such step, or another step uses its model.
    """
    recipe = run.recipe()
    known = [each.label for each in recipe.steps]
    if label not in known:
        of = [step for step, control in recipe.find_controls().items() if control == label]
        instead = f", the control of {', '.join(of)}: drop that step" if of else suggest(label, known)
        raise EnfoldError(
            f"only steps can be dropped, of which the run has {', '.join(known) or 'none'}, got '{label}'"
            f"{instead or ': correct the label'}"
        )
    users = [each.label for each in recipe.steps if label in recipe.dependencies(each)]
    if users:
        raise EnfoldError(f"'{label}' is used by {', '.join(users)}: drop {users[0]} first")
    without, named = _without(recipe, label), recipe.find_controls()
    renumbered = {step: named[step] for step, control in without.find_controls().items() if control != named[step]}
    without = without.model_copy(update={"control_names": {**without.control_names, **renumbered}})
    (run.path / "summary.json").unlink(missing_ok=True)  # until it is written again, reports read each seed's results
    _replace_recipe(run, recipe, without)
    folders = [each.run for each in seed_runs(run, without)]
    if not all((folder.path / "results.json").is_file() for folder in folders):
        return None
    return _write_summary(run, without, [folder.read_json("results.json")["rows"] for folder in folders])


def _require_free(run: RunDirectory, recipe: Recipe, label: str) -> None:
    """Refuse the label of a step that is made already."""
    stages = [(each, kind) for each in seed_runs(run, recipe) for kind, name in each.list_models() if name == label]
    if any(each.run.is_done(kind, label) for each, kind in stages):
        labels = [each.label for each in recipe.steps]
        free = next(name for number in count(2) if (name := f"{label}-{number}") not in labels)
        raise EnfoldError(
            f"every step of a run must have its own label, got '{label}' with other options, and the run has "
            f"{', '.join(labels)}: add --label {free}"
        )


def _without(recipe: Recipe, label: str) -> Recipe:
    names = {step: name for step, name in recipe.control_names.items() if step != label}
    steps = tuple(each for each in recipe.steps if each.label != label)
    return recipe.model_copy(update={"steps": steps, "control_names": names})


def _replace_recipe(run: RunDirectory, before: Recipe, after: Recipe) -> None:
    """Write another recipe; models of the first that are not in the second are removed."""
    for old, new in zip(seed_runs(run, before), seed_runs(run, after), strict=True):
        retained = new.list_models()
        for stage, spec in old.list_models().items():
            if retained.get(stage) != spec:  # also a control with a changed number
                remove_model(old, *stage)
    run.write_recipe(after)


def open_run(path: Path, *, trust_code: bool = False) -> tuple[RunDirectory, Recipe]:
    """Return an existing run with trained members, and its recipe.

    Raises:
        EnfoldError: If members are missing, or the recipe names code and `trust_code` is False.
    """
    run = RunDirectory.open(path, trust_code=trust_code)
    run.prepare()
    recipe = run.recipe()
    run.require_trust(recipe)
    for each in seed_runs(run, recipe):
        if not each.run.is_done("members", "members"):
            finish = recipe.command("run", run.recipe_file, run.path, "--resume")
            raise EnfoldError(f"a run must have trained members, but '{each.run.path}' has none: finish with  {finish}")
    return run, recipe
