"""Reproduce: run a published table or figure at a chosen scale and evaluate its claims on the results."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

from enfold.data import catalogue
from enfold.errors import EnfoldError, MissingExtra
from enfold.evaluate import predict
from enfold.io.files import write_text
from enfold.metrics import accuracy, mean_member
from enfold.report.page import to_json
from enfold.run.directory import RunDirectory
from enfold.run.estimate import Estimate, estimate
from enfold.run.execute import execute, seed_runs
from enfold.run.recipe import Recipe
from enfold.run.seed_run import SeedRun
from studies.analyses import Tree, draw_analysis, run_analysis
from studies.claims import evaluate_claims
from studies.definition import Definition, Scale, claimed_rows, get_scale, load_definition, make_recipes
from studies.evidence import MEAN_MEMBER, Evidence, RowName
from studies.gains import gains
from studies.page import make_page
from studies.tables import claims_csv, rows_csv


@dataclass(frozen=True)
class Options:
    """Which table to run, and how.

    Args:
        name: A table or figure.
        scale: smoke, laptop or paper.
        changes: Changes of every recipe, as key.key=value.
        only: Names or patterns of the table's runs; all by default.
        device: The device to train on.
        resume: Continue runs that exist already.
        trust_code: Allow the user code that a change names.
        stored: Evaluate what is stored and train nothing.
    """

    name: str
    scale: str = "laptop"
    changes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    device: str = "cpu"
    resume: bool = False
    trust_code: bool = False
    stored: bool = False


def reproduce(options: Options, out: Path) -> dict[str, Any]:
    """Run what is missing of a table, then return its rows beside the published ones, with a verdict for each claim."""
    started = time.monotonic()
    definition, scale = load_definition(options.name), get_scale(options.name, options.scale)
    recipes = select_recipes(options)
    directories = _check(recipes, out, options)
    with ExitStack() as locks:
        for directory in directories.values():
            locks.enter_context(directory.writing())
        runs = {name: open_or_extend(place, recipes[name], options) for name, place in directories.items()}
        for run in () if options.stored else runs.values():
            execute(run, run.recipe(), device=options.device)
        made = {name: seed_runs(run, run.recipe(), options.device) for name, run in runs.items()}
        analyses, figures = _analyse(definition, scale, made, out)
    evidence = _evidence(made, analyses, scale, partial=options.stored)
    fitted = {name: _training_accuracy(each) for name, each in made.items()} if definition.regime else {}
    about = {
        "name": options.name,
        "title": definition.title,
        "scale": options.scale,
        "changes": list(options.changes),
        "only": list(options.only),
        "regime": definition.regime,
        "command": shlex.join(_command(options)),
        "seeds": list(next(iter(recipes.values())).seeds),
        "runs": {name: _describe(runs[name], recipes[name], out) for name in recipes},
        "training_accuracy": fitted,
        "training_seconds": {name: _training_seconds(each) for name, each in made.items()} if fitted else {},
        "other_data": other_data(options, recipes),
        "substitutes": scale.substitutes,
        "figures": figures,
        "rows": _rows(definition, recipes, evidence),
    }
    evaluated = evaluate_claims(evidence, definition, about, replicates=scale.replicates)
    content: dict[str, Any] = to_json({**evaluated, "seconds": time.monotonic() - started})
    return content


def _command(options: Options) -> list[str]:
    """Return the command that makes these results."""
    changes = [word for change in options.changes for word in ("--set", change)]
    only = ["--only", ",".join(options.only)] if options.only else []
    scale = [] if options.scale == "laptop" else ["--scale", options.scale]
    return ["python", "-m", "studies", options.name, *scale, *only, *changes]


def _training_accuracy(runs: Sequence[SeedRun]) -> list[float]:
    """Return the mean accuracy of the members on their training images, for each seed."""
    made = [each for each in runs if each.is_done("members", "members")]
    return [mean_member(accuracy, predict(each.members(), each.data.train)) for each in made]


def _training_seconds(runs: Sequence[SeedRun]) -> float:
    """Return the time that all stored trainings of a run took, whichever table made them."""
    files = [file for each in runs for file in (each.run.path / "histories").rglob("*.json")]
    files += [file for each in runs if (file := each.run.path / "members" / "history.json").is_file()]
    histories = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return math.fsum(epoch["seconds"] for history in histories for epoch in history["epochs"])


def estimate_runs(options: Options) -> dict[str, Estimate]:
    """Return the estimated time and memory of every run; nothing is written."""
    recipes = select_recipes(options)
    return {name: estimate(recipe, options.device, trust_code=options.trust_code) for name, recipe in recipes.items()}


def write_results(content: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the results as JSON, CSV and one HTML page into the folder of the runs."""
    figures = {name: (out / name).read_bytes() for name in content["figures"]}
    name = content["name"]
    texts = {
        f"{name}.json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
        f"{name}.csv": rows_csv(content),
        f"{name}.claims.csv": claims_csv(content),
        f"{name}.html": make_page(content, figures),
    }
    for file, text in texts.items():
        write_text(out / file, text)
    return [out / file for file in texts]


def select_recipes(options: Options) -> Mapping[str, Recipe]:
    """Return the recipes of the runs that `only` selects; their data sets must be present."""
    recipes = make_recipes(options.name, options.scale, options.changes)
    patterns = options.only or ("*",)
    chosen = {name: recipe for name, recipe in recipes.items() if any(fnmatch(name, each) for each in patterns)}
    if not chosen:
        raise EnfoldError(
            f"--only must match runs of '{options.name}', got {', '.join(options.only)}: they are {', '.join(recipes)}"
        )
    present = {row.name: row.present for row in catalogue()}
    for recipe in chosen.values():
        source = recipe.data.source
        if not present.get(source, True):
            raise EnfoldError(
                f"'{options.name}' at the scale {options.scale} needs the data set {source}, which was not found: "
                f"download it with  enfold data {source} --fetch , see  enfold data {source} --check  for where its "
                "files belong, or use --scale smoke, which needs no download"
            )
    return chosen


def other_data(options: Options, recipes: Mapping[str, Recipe]) -> dict[str, list[str]]:
    """Return the published data set and the one used, for every run where a change replaced it."""
    unchanged, published = make_recipes(options.name, options.scale), make_recipes(options.name, "paper")
    return {
        run: [published.get(run, unchanged[run]).data.source, recipe.data.source]
        for run, recipe in recipes.items()
        if recipe.data.source != unchanged[run].data.source
    }


def open_or_extend(place: RunDirectory, recipe: Recipe, options: Options) -> RunDirectory:
    """Create or resume a run; tables that use the same run add their steps to it."""
    if place.recipe_file.exists():
        known = place.recipe()
        steps = (*known.steps, *(step for step in recipe.steps if step not in known.steps))
        labels = [step.label for step in steps]
        both = known.model_copy(update={"steps": steps, "corruptions": known.corruptions or recipe.corruptions})
        if both != known and both.extends(recipe) and len(set(labels)) == len(labels):
            place.write_recipe(both)
    resume = options.resume or _is_shared(place, options.name)
    return RunDirectory.create(place.path, recipe, resume=resume, trust_code=options.trust_code)


def _is_shared(place: RunDirectory, name: str) -> bool:
    """Return whether the run was made for another table, and not yet for this one."""
    users = set()
    for file in place.path.parent.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        runs = content.get("runs") if isinstance(content, dict) else None
        if isinstance(runs, dict) and place.path.name in [each.get("path") for each in runs.values()]:
            users.add(file.stem)
    return bool(users) and name not in users


def _check(recipes: Mapping[str, Recipe], out: Path, options: Options) -> dict[str, RunDirectory]:
    """Return the directory of every run, after all checks and before anything is written."""
    places = {name: RunDirectory(out / recipe.name, trust_code=options.trust_code) for name, recipe in recipes.items()}
    for name, other in combinations(recipes, 2):
        if places[name].path == places[other].path:
            raise EnfoldError(
                f"every run needs its own folder, got '{recipes[name].name}' for both {name} and {other}: "
                "remove --set name"
            )
    for place in places.values():
        if place.manifest_file.exists() and not options.resume and not _is_shared(place, options.name):
            raise EnfoldError(
                f"'{place.path}' already contains a run: add --resume to continue it, or choose another --out"
            )
    for name, place in places.items():
        place.require_trust(recipes[name])
        if not place.recipe_file.exists():
            seed_runs(place, recipes[name], options.device)[0].check()
    return places


def _analyse(
    definition: Definition, scale: Scale, runs: Mapping[str, Sequence[SeedRun]], out: Path
) -> tuple[dict[str, list[Tree]], list[str]]:
    """Return the results of the analysis for every run and seed, and the files of its figures."""
    results: dict[str, list[Tree]] = {}
    if definition.analysis is None:
        return results, []
    name = definition.analysis.name
    settings = {**definition.analysis.settings, **scale.analysis}
    for run, seeds in runs.items():
        results[run] = [{name: run_analysis(name, seed_run, settings)} for seed_run in seeds]
    return results, _draw(name, runs, results, out) if scale.figures else []


def _draw(
    analysis: str, runs: Mapping[str, Sequence[SeedRun]], results: Mapping[str, list[Tree]], out: Path
) -> list[str]:
    """Draw figures of the first seed of each run; none without matplotlib."""
    try:
        drawn = [
            path
            for name, seeds in runs.items()
            for path in draw_analysis(analysis, seeds[0], results[name][0][analysis])
        ]
    except MissingExtra:
        return []
    return [str(path.relative_to(out)) for path in drawn]


def _evidence(
    made: Mapping[str, Sequence[SeedRun]], analyses: Mapping[str, list[Tree]], scale: Scale, *, partial: bool
) -> Evidence:
    """Return all runs by name; substituted runs are read from the run that is used instead."""
    first = next(iter(made))
    substituted = {name: made[other] for name, other in scale.substitutes.items() if other in made}
    runs = {**made, "": made[first], **substituted}
    trees = {name: analyses.get(scale.substitutes.get(name, name or first), []) for name in runs}
    return Evidence(runs, trees, partial=partial)


def _describe(run: RunDirectory, recipe: Recipe, out: Path) -> dict[str, Any]:
    network = recipe.network if isinstance(recipe.network, str) else dict(recipe.network)
    return {
        "path": str(run.path.relative_to(out)),
        "data": recipe.data.model_dump(),
        "network": network,
        "members": recipe.members,
        "seeds": list(recipe.seeds),
        "train": recipe.train,
    }


def _rows(definition: Definition, recipes: Mapping[str, Recipe], evidence: Evidence) -> list[dict[str, Any]]:
    """Return every published or computed row, with both values for each metric."""
    of_models = (claim.metric for claim in definition.claims if not RowName.parse(definition.label(claim.first)).path)
    published = (
        key for row, values in definition.published.items() if not _is_number(definition, row) for key in values
    )
    metrics = list(dict.fromkeys((*definition.metrics, *published, *of_models)))
    named = (*definition.rows, *definition.published, *claimed_rows(definition))
    rows = []
    for row in dict.fromkeys((*named, *_other_rows(definition, recipes))):
        name = RowName.parse(definition.label(row))
        claimed = [claim.metric for claim in definition.claims if row in (claim.first, claim.second)]
        shown = dict.fromkeys((*definition.published.get(row, ()), *claimed)) if name.path else metrics
        values = {
            metric: {"published": definition.value(row, metric), "ours": _ours(evidence, definition.label(row), metric)}
            for metric in shown
        }
        if any(each["published"] is not None or each["ours"] is not None for each in values.values()):
            label = definition.label(row)
            about: dict[str, Any] = {"run": name.run, "row": row, "label": label, "metrics": values}
            if definition.regime:
                about["gain"] = gains(evidence, label)
            if definition.cost:
                about["cost"] = evidence.cost(label)
            rows.append(about)
    return rows


def _is_number(definition: Definition, row: str) -> bool:
    """Return whether a row is a number of an analysis, and not a model."""
    return bool(RowName.parse(definition.label(row)).path)


def _ours(evidence: Evidence, label: str, metric: str) -> dict[str, Any] | None:
    try:
        row = evidence.row(label, metric)
    except EnfoldError:  # the row cannot have this metric, such as the diversity of one network
        return None
    return None if row is None else row.as_dict()


def _other_rows(definition: Definition, recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Return one network, controls and steps that the definition does not name."""
    named_rows = (*definition.rows, *definition.published, *claimed_rows(definition))
    names = [RowName.parse(definition.label(row)) for row in named_rows]
    named = {MEAN_MEMBER if each.of_mean_member and each.file == "ensemble" else each.file for each in names}
    for run, recipe in recipes.items():
        for label in (MEAN_MEMBER, "control", *(step.label for step in recipe.steps)):
            if label not in named:
                yield f"{run}/{label}"
