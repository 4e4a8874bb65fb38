"""Collect the stored results of a run for a report or a model card; nothing is trained or written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.io.identity import Identity
from enfold.metrics import gain_recovered, metrics_for
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.registry import suggest
from enfold.report.content import ONE, Content, Example, Examples, Headline, Seed
from enfold.report.metric_columns import criterion_of, needed_scores
from enfold.run.compare import Comparison
from enfold.run.directory import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.figure_data import uncertainty_figures
from enfold.run.recipe import Recipe
from enfold.run.results import summarise
from enfold.run.seed_run import SeedRun
from enfold.run.trainings import read_trainings

SHOWN = 12  # examples


def collect(path: Path, *, label: str | None = None) -> Content:
    """Return the content of a report about one run, finished or in progress.

    Args:
        path: The run directory.
        label: The model to ship; by default the best single network on validation data.
    """
    run = RunDirectory.open(path)
    recipe = run.recipe()
    try:
        return _collect(run, recipe, label)
    except (
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        ValueError,
    ) as error:  # a file may have any content
        raise EnfoldError(
            f"'{path}' must contain results written by enfold, but one of its files does not "
            f"({type(error).__name__}: {error}): write them again with  {recipe.command('evaluate', path)}"
        ) from error


def _collect(run: RunDirectory, recipe: Recipe, label: str | None) -> Content:
    runs = seed_runs(run, recipe)
    summary = _summary(run, recipe, runs)
    labels = [name for name in summary["rows"] if name != ONE and not name.startswith("ensemble of ")]
    evaluated = [each for each in runs if each.seed in summary["seeds"]]
    seeds = tuple(_seed(each, labels if each in evaluated else []) for each in runs)
    outputs = {
        name: [seed.predictions[name] for seed in seeds if name in seed.predictions] for name in ("ensemble", *labels)
    }
    outputs = {name: each for name, each in outputs.items() if evaluated and len(each) == len(evaluated)}
    comparison = Comparison({name: [parts["test"] for parts in each] for name, each in outputs.items()}, recipe.sizes)
    controls = recipe.find_controls()
    headline = _headline(recipe, summary, outputs, controls, comparison, label)
    return Content(
        name=recipe.name,
        folder=run.path,
        trust=" --trust-code" if recipe.code_references() else "",
        summary=summary,
        recipe=run.recipe_file.read_text(encoding="utf-8"),
        versions=summary.get("versions") or run.read_json("run.json")["versions"],
        seeds=seeds,
        trainings=read_trainings(runs),
        differences=comparison.to_mean_member(summary["rows"]),
        controls={step: control for step, control in controls.items() if control in summary["rows"]},
        headline=headline,
        examples=_examples(run, recipe, seeds, headline),
        uncertainty=uncertainty_figures(seeds, headline),
    )


def _summary(run: RunDirectory, recipe: Recipe, runs: list[SeedRun]) -> dict[str, Any]:
    """Return the stored summary of the run, or of the seeds that are evaluated so far."""
    if (run.path / "summary.json").is_file():
        summary: dict[str, Any] = dict(run.read_json("summary.json"))
    else:
        done = [each for each in runs if (each.run.path / "results.json").is_file()]
        rows = summarise([each.run.read_json("results.json")["rows"] for each in done]) if done else {}
        summary = {"seeds": [each.seed for each in done], "rows": rows, "recipe": recipe.model_dump(mode="json")}
    for name, row in summary["rows"].items():
        needed = needed_scores(summary["rows"])
        missing = needed - row["scores"].keys()
        if missing or any(not isinstance(row["scores"][metric]["mean"], float) for metric in needed):
            raise ValueError(f"the scores of '{name}' are not complete")
    return summary


def _seed(run: SeedRun, labels: list[str]) -> Seed:
    predictions: dict[str, Mapping[str, RowPredictions]] = {}
    for label in labels:
        stored = run.run.read_predictions(label)
        file = run.run.path / "predictions" / f"{label}.safetensors"
        if stored is None and file.exists():
            raise EnfoldError(
                f"'{file}' must contain predictions, but it is damaged: delete it and run  enfold evaluate"
            )
        if stored is not None:
            predictions[label] = stored
    kept = {
        name: run.run.read_json(f"{name}.json") if (run.run.path / f"{name}.json").is_file() else None
        for name in ("corrupted", "ood")
    }
    return Seed(run.seed, run.run.path, predictions, **kept)


def _headline(
    recipe: Recipe,
    summary: Mapping[str, Any],
    outputs: Mapping[str, list[Mapping[str, RowPredictions]]],
    controls: Mapping[str, str],
    comparison: Comparison,
    label: str | None,
) -> Headline | None:
    """Return the single network, else the ensemble step, with the lowest NLL on validation data, or the given label.

    A step whose weights are those of a member does not count.

    Args:
        recipe: The recipe of the run.
        summary: The mean scores of the rows.
        outputs: The predictions of each row, a list over seeds.
        controls: The name of the control of each step.
        comparison: Differences between rows.
        label: The step to report; None chooses it.
    """
    rows = summary["rows"]
    steps = [step for step in recipe.steps if step.label in outputs]
    labels = [step.label for step in steps]
    if label is not None and label not in labels:
        raise EnfoldError(
            f"--label must be an evaluated step of the run, got '{label}'"
            f"{suggest(label, labels) or ': the run has ' + (', '.join(labels) or 'none')}"
        )
    made = [s.label for s in steps if s.family != "ensemble" and "member" not in rows[s.label]]  # not an equal member
    single = [each for each in made if outputs[each][0]["test"].num_members == 1]
    candidates = [label] if label else single or made or [s.label for s in steps if s.family == "ensemble"]
    if not candidates:
        return None
    criterion = criterion_of(rows)

    def loss(label: str) -> float:
        parts = [each["validation"] for each in outputs[label]]
        return sum(metrics_for(part)[criterion](part) for part in parts)

    chosen = min(candidates, key=loss)
    control = controls.get(chosen)
    control = control if control in outputs else None
    ensemble = comparison.difference("ensemble", ONE, "accuracy")
    gain = None
    if ensemble is not None and ensemble.lower > 0:
        means = [rows[name]["scores"]["accuracy"]["mean"] for name in (chosen, ONE, "ensemble")]
        gain = gain_recovered(*means, higher_is_better=True)
    return Headline(
        label=chosen,
        candidates=len(candidates),
        members=outputs[chosen][0]["test"].num_members,
        control=control,
        to_control=comparison.difference(chosen, control, criterion) if control else None,
        accuracy_gain=gain,
    )


def _examples(run: RunDirectory, recipe: Recipe, seeds: tuple[Seed, ...], headline: Headline | None) -> Examples | None:
    """Return the examples on which ensemble and headline model differ most in total variation, for the first seed."""
    if headline is None:
        return None
    seed = next(seed for seed in seeds if headline.label in seed.predictions)
    if type(seed.predictions[headline.label]["test"]) is not Predictions:  # of one class per example
        return None
    teacher, model = (seed.predictions[name]["test"].mean() for name in ("ensemble", headline.label))
    first, second = (each.log_probs[0].exp() for each in (teacher, model))  # (N, C)
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
    """Return the data if they are available without a download or user code, and otherwise the reason."""
    spec = recipe.data
    if ":" in spec.source:
        return None, "no code is run for a report, so the inputs are not shown"
    try:
        data = spec.load(download=False)
    except EnfoldError:
        return None, f"the data '{spec.source}' are not on this machine, so the inputs are not shown"
    test = data.test if isinstance(data.test, Split) else None
    same = test is not None and torch.equal(test.labels, labels)
    if test is None or not same or made_from.get("test inputs", test.digests[0]) != test.digests[0]:
        return None, f"the data '{spec.source}' are no longer those of the run, so the inputs are not shown"
    return data, ""


def _image(data: Data, index: int) -> torch.Tensor | None:
    """Return an image as bytes (C, H, W); None if the inputs are not images."""
    if not isinstance(data.test, Split) or data.test.inputs.ndim != 4 or data.test.inputs.shape[1] not in (1, 3):
        return None
    image = data.test.inputs[index]
    if image.dtype == torch.uint8:
        return image
    return (image * 255).round().byte() if data.has_pixels and image.min() >= 0 and image.max() <= 1 else None
