"""Gather: everything that is stored of a run, read and compared for a page or a card; nothing is run or written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.io.identity import Identity
from enfold.metrics import gain_recovered, nll
from enfold.metrics.predictions import Predictions
from enfold.registry import nearest
from enfold.report.content import ONE, Content, Example, Examples, Headline, Seed
from enfold.run.compare import Comparison
from enfold.run.directory import RunDirectory
from enfold.run.execute import cells
from enfold.run.measured import doubt_of
from enfold.run.recipe import Recipe
from enfold.run.results import summarise
from enfold.run.stages import Cell
from enfold.run.trainings import trainings

SHOWN = 12  # examples
NEEDED = {"accuracy", "nll", "ece", "brier"}


def gather(path: Path, *, label: str | None = None) -> Content:
    """One run, finished or growing; `label` is the model to ship, by default the best fold by validation data."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    try:
        return _gather(run, recipe, label)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:  # any file may hold anything
        raise EnfoldError(
            f"'{path}' must hold results as enfold writes them, but one of its files does not "
            f"({type(error).__name__}: {error}): write them anew with  {recipe.command('evaluate', path)}"
        ) from error


def _gather(run: RunDirectory, recipe: Recipe, label: str | None) -> Content:
    parts = cells(run, recipe)
    summary = _summary(run, recipe, parts)
    labels = [name for name in summary["rows"] if name != ONE and not name.startswith("ensemble of ")]
    asked = [cell for cell in parts if cell.seed in summary["seeds"]]
    seeds = tuple(_seed(cell, labels if cell in asked else []) for cell in parts)
    said = {
        name: [seed.predictions[name] for seed in seeds if name in seed.predictions] for name in ("ensemble", *labels)
    }
    said = {name: each for name, each in said.items() if asked and len(each) == len(asked)}
    comparison = Comparison({name: [parts["test"] for parts in each] for name, each in said.items()}, recipe.sizes)
    controls = recipe.controlled()
    headline = _headline(recipe, summary, said, controls, comparison, label)
    return Content(
        name=recipe.name,
        folder=run.path,
        trust=" --trust-code" if recipe.code_references() else "",
        summary=summary,
        recipe=run.recipe_file.read_text(encoding="utf-8"),
        versions=summary.get("versions") or run.read_json("run.json")["versions"],
        seeds=seeds,
        trainings=trainings(parts),
        differences=comparison.to_mean_member(summary["rows"]),
        controls={fold: control for fold, control in controls.items() if control in summary["rows"]},
        headline=headline,
        examples=_examples(run, recipe, seeds, headline),
        doubt=doubt_of(seeds, headline),
    )


def _summary(run: RunDirectory, recipe: Recipe, parts: list[Cell]) -> dict[str, Any]:
    """What the run wrote at its end, or the seeds that are evaluated so far."""
    if (run.path / "summary.json").is_file():
        summary: dict[str, Any] = dict(run.read_json("summary.json"))
    else:
        done = [cell for cell in parts if (cell.run.path / "results.json").is_file()]
        rows = summarise([cell.run.read_json("results.json")["rows"] for cell in done]) if done else {}
        summary = {"seeds": [cell.seed for cell in done], "rows": rows, "recipe": recipe.model_dump(mode="json")}
    for name, row in summary["rows"].items():
        missing = NEEDED - row["scores"].keys()
        if missing or any(not isinstance(row["scores"][metric]["mean"], float) for metric in NEEDED):
            raise ValueError(f"the scores of '{name}' are not whole")
    return summary


def _seed(cell: Cell, labels: list[str]) -> Seed:
    predictions: dict[str, Mapping[str, Predictions]] = {}
    for label in labels:
        stored = cell.run.read_predictions(label)
        file = cell.run.path / "predictions" / f"{label}.safetensors"
        if stored is None and file.exists():
            raise EnfoldError(f"'{file}' must hold predictions, but it is damaged: delete it and run  enfold evaluate")
        if stored is not None:
            predictions[label] = stored
    kept = {
        name: cell.run.read_json(f"{name}.json") if (cell.run.path / f"{name}.json").is_file() else None
        for name in ("corrupted", "ood")
    }
    return Seed(cell.seed, cell.run.path, predictions, **kept)


def _headline(
    recipe: Recipe,
    summary: Mapping[str, Any],
    said: Mapping[str, list[Mapping[str, Predictions]]],
    controls: Mapping[str, str],
    comparison: Comparison,
    label: str | None,
) -> Headline | None:
    """The one network, else the share, with the lowest NLL on validation data, or the one asked for.

    A fold that has a member's own weights is none.
    """
    rows = summary["rows"]
    folds = [fold.label for fold in recipe.folds if fold.label in said]
    shares = [share.label for share in recipe.shares if share.label in said]
    if label is not None and label not in (*folds, *shares):
        raise EnfoldError(
            f"a model to ship must be an evaluated fold or share of the run, got '{label}'"
            f"{nearest(label, [*folds, *shares]) or ': the run has ' + (', '.join([*folds, *shares]) or 'none')}"
        )
    made = [fold for fold in folds if "member" not in rows[fold]]  # not a member as it was
    alone = [fold for fold in made if said[fold][0]["test"].num_members == 1]
    candidates = [label] if label else alone or made or shares
    if not candidates:
        return None
    chosen = min(candidates, key=lambda each: sum(nll(parts["validation"]) for parts in said[each]))
    control = controls.get(chosen)
    control = control if control in said else None
    ensemble = comparison.difference("ensemble", ONE, "accuracy")
    gain = None
    if ensemble is not None and ensemble.lower > 0:
        means = [rows[name]["scores"]["accuracy"]["mean"] for name in (chosen, ONE, "ensemble")]
        gain = gain_recovered(*means, higher_is_better=True)
    return Headline(
        label=chosen,
        candidates=len(candidates),
        members=said[chosen][0]["test"].num_members,
        control=control,
        to_control=comparison.difference(chosen, control, "nll") if control else None,
        accuracy_gain=gain,
    )


def _examples(run: RunDirectory, recipe: Recipe, seeds: tuple[Seed, ...], headline: Headline | None) -> Examples | None:
    """Where the ensemble and the headline's model differ most, in total variation, for the first seed."""
    if headline is None:
        return None
    seed = next(seed for seed in seeds if headline.label in seed.predictions)
    teacher, fold = (seed.predictions[name]["test"].mean() for name in ("ensemble", headline.label))
    first, second = (each.log_probs[0].exp() for each in (teacher, fold))  # (N, C)
    distance = (first - second).abs().sum(-1) / 2
    with run.context():
        data, notice = _data(recipe, teacher.labels, RunDirectory(seed.folder).made_from("members", "members"))
    found = []
    for index in distance.argsort(descending=True, stable=True)[:SHOWN].tolist():
        image = _image(data, index) if data is not None else None
        truth = int(teacher.labels[index])
        found.append(Example(index, truth, float(distance[index]), first[index], second[index], image))
    names = data.names if data is not None else ()
    return Examples(headline.label, seed.seed, len(distance), names, tuple(found), notice)


def _data(recipe: Recipe, labels: torch.Tensor, made_from: Identity) -> tuple[Data | None, str]:
    """The data if they are at hand: nothing is downloaded, and no code of the user's own is run."""
    spec = recipe.data
    if ":" in spec.source:
        return None, "no code is run for a report, so the inputs are not shown"
    try:
        data = spec.load(download=False)
    except EnfoldError:
        return None, f"the data '{spec.source}' are not at hand, so the inputs are not shown"
    test = data.test if isinstance(data.test, Split) else None
    same = test is not None and torch.equal(test.labels, labels)
    if test is None or not same or made_from.get("test inputs", test.digests[0]) != test.digests[0]:
        return None, f"the data '{spec.source}' are no longer those of the run, so the inputs are not shown"
    return data, ""


def _image(data: Data, index: int) -> torch.Tensor | None:
    """(C, H, W) in bytes, where the inputs are images."""
    if not isinstance(data.test, Split) or data.test.inputs.ndim != 4 or data.test.inputs.shape[1] not in (1, 3):
        return None
    image = data.test.inputs[index]
    if image.dtype == torch.uint8:
        return image
    return (image * 255).round().byte() if data.has_pixels and image.min() >= 0 and image.max() <= 1 else None
