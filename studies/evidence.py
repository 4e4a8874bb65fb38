"""Evidence: the numbers that runs have stored for a row of a table, one value for each seed.

A row is named by the label of a model in the run, "mean member", "mean member of LABEL", "best member", "best member of
LABEL" (the best on test data) or "ensemble of K". With
" weighted by KIND", its members have the weights of `fit_weights`, and with " + temperature" at the end, its outputs
are divided by the temperature, both fitted on validation data. With several runs the name is "RUN/LABEL". A number from
an analysis is "RUN/ANALYSIS/KEY/KEY/...", such as fashion/alignment/rows/0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast, get_args

import torch

from enfold.errors import EnfoldError
from enfold.metrics import accuracy
from enfold.metrics.averaging import Averaging, averaging_weights
from enfold.metrics.bootstrap import metric_value
from enfold.metrics.predictions import Predictions
from enfold.metrics.scores import per_member
from enfold.metrics.temperature import apply_temperature, fit_temperature
from enfold.run.seed_run import SeedRun

SCALED = " + temperature"
WEIGHTED = " weighted by "
MEAN_MEMBER = "mean member"  # of the run's own members; "mean member of LABEL" is that of an efficient ensemble
BEST_MEMBER = "best member"
CALIBRATED = {f"c{name}": name for name in ("nll", "ece", "brier")}  # at the temperature fitted on validation data
CORRUPTED = {f"corrupted {name}": name for name in ("accuracy", "nll", "ece")}  # mean over kinds and severities
FIRST_MEMBERS = re.compile(r"ensemble of (\d+)")
REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {  # applied to a list in the results of an analysis
    "first": lambda values: values[0],
    "middle": lambda values: values[len(values) // 2],
    "last": lambda values: values[-1],
    "ends": lambda values: (values[0] + values[-1]) / 2,
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}


@dataclass(frozen=True)
class RowName:
    """A parsed row name: predictions of a run, or a number in the results of an analysis."""

    run: str
    file: str
    first: int | None = None  # use only the first members
    of_mean_member: bool = False
    path: tuple[str, ...] = ()
    scaled: bool = False  # by the temperature fitted on validation data
    weights: Averaging | None = None  # of the members, fitted on validation data
    of_best_member: bool = False  # the most accurate on test data

    @classmethod
    def parse(cls, label: str) -> RowName:
        """Return the parts of a row name."""
        run, *words = label.split("/") if "/" in label else ("", label)
        if len(words) > 1:
            return cls(run, words[0], path=tuple(words[1:]))
        label, _, kind = words[0].removesuffix(SCALED).partition(WEIGHTED)
        if kind and kind not in get_args(Averaging):
            raise EnfoldError(f"a row is weighted by one of {', '.join(get_args(Averaging))}, got '{kind}': change it")
        file, of_mean_member = _remove_prefix(label, MEAN_MEMBER)
        file, of_best_member = _remove_prefix(file, BEST_MEMBER)
        first = FIRST_MEMBERS.fullmatch(file)
        number, scaled = int(first[1]) if first else None, words[0].endswith(SCALED)
        file = "ensemble" if first else file
        weights = cast(Averaging, kind) if kind else None
        return cls(run, file, number, of_mean_member, (), scaled, weights, of_best_member)


@dataclass(frozen=True)
class Row:
    """A metric of one row for every seed that has it, with the predictions it was computed from, if any."""

    values: list[float]
    seeds: tuple[int, ...]
    predictions: list[Predictions] | None = None
    of_mean_member: bool = False

    def select(self, seeds: Collection[int]) -> Row:
        """Return the row restricted to these seeds."""
        indices = [index for index, seed in enumerate(self.seeds) if seed in seeds]
        return replace(
            self,
            values=[self.values[index] for index in indices],
            seeds=tuple(self.seeds[index] for index in indices),
            predictions=None if self.predictions is None else [self.predictions[index] for index in indices],
        )

    def as_dict(self) -> dict[str, Any]:
        """Return mean, standard deviation and values over seeds, for JSON."""
        std = statistics.stdev(self.values) if len(self.values) > 1 else None
        return {"mean": statistics.fmean(self.values), "std": std, "values": self.values}


class Evidence:
    """The stored results of several runs; predictions are read once.

    Args:
        runs: The seed runs of every run, by name; "" is the only or first one.
        analyses: For each run, one tree of numbers per seed: the results of its analyses.
        partial: Use the seeds that have a row; by default all must have it.
    """

    def __init__(
        self,
        runs: Mapping[str, Sequence[SeedRun]],
        analyses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        *,
        partial: bool = False,
    ) -> None:
        self._runs, self._analyses, self._partial = runs, analyses or {}, partial
        self._read = cache(self._read_predictions)

    def row(self, label: str, metric: str) -> Row | None:
        """Return a metric of a row, or None if a seed lacks it; with `partial` if all lack it."""
        name = RowName.parse(label)
        if name.run not in self._runs:
            return None
        if (name.scaled or name.weights or name.of_best_member) and metric in CORRUPTED:
            return None  # predictions for corrupted images are not stored
        if name.path or metric in CORRUPTED:
            found = {seed: _look_up(tree, name.path) for seed, tree in self._trees(name, metric).items()}
            numbers = {seed: value for seed, value in found.items() if value is not None}
            return Row(list(numbers.values()), tuple(numbers)) if self._is_enough(name, numbers) else None
        stored = self._read(name, name.scaled or metric in CALIBRATED)
        if not self._is_enough(name, stored):
            return None
        seeds, predictions = tuple(stored), list(stored.values())
        base = CALIBRATED.get(metric, metric)
        values = [metric_value(base, each, of_mean_member=name.of_mean_member) for each in predictions]
        return Row(values, seeds, predictions, name.of_mean_member)

    def cost(self, label: str) -> dict[str, Any] | None:
        """Return the cost of a row's model relative to one network, which is measured for the first seed."""
        name = RowName.parse(label)
        (first, *_) = self._runs.get(name.run, (None,))
        if first is None or name.path or not (first.run.path / "results.json").is_file():
            return None
        one = name.of_mean_member or name.of_best_member
        label = MEAN_MEMBER if one and name.file == "ensemble" else name.file
        label = label if name.first is None else f"ensemble of {name.first}"
        found = first.run.read_json("results.json")["rows"].get(label, {}).get("cost")
        return None if found is None else dict(found["ratios"])

    def _is_enough(self, name: RowName, found: Collection[int]) -> bool:
        return bool(found) and (self._partial or len(found) == len(self._seed_runs(name)))

    def _seed_runs(self, name: RowName) -> list[SeedRun]:
        """Return the seeds for which the recipe has the row."""
        run = self._runs[name.run]
        restricted = {step.label: step.seeds for step in run[0].recipe.steps if step.seeds is not None} if run else {}
        return [seed_run for seed_run in run if seed_run.seed in restricted.get(name.file, (seed_run.seed,))]

    def _trees(self, name: RowName, metric: str) -> dict[int, Any]:
        """Return the results of each seed in which the number is looked up."""
        if name.path:
            trees = self._analyses.get(name.run, ())
            return {each.seed: tree.get(name.file) for each, tree in zip(self._runs[name.run], trees, strict=False)}
        if name.first is not None:
            return {}
        label = MEAN_MEMBER if name.of_mean_member and name.file == "ensemble" else name.file
        found = {}
        for each in self._seed_runs(name):
            if (each.run.path / "results.json").is_file():
                row = each.run.read_json("results.json")["rows"].get(label, {})
                found[each.seed] = (row.get("corrupted") or {}).get(CORRUPTED[metric])
        return found

    def _read_predictions(self, name: RowName, calibrated: bool) -> dict[int, Predictions]:
        """Return the test predictions of each seed that has them."""
        needed = {"test", "validation"} if calibrated or name.weights else {"test"}
        found = {}
        for each in self._seed_runs(name):
            splits = each.run.read_predictions(name.file)
            if splits is None or not splits.keys() >= needed or (name.first or 1) > splits["test"].num_members:
                continue
            if name.first is not None:
                splits = {split: each.subset(range(name.first)) for split, each in splits.items()}
            if name.of_best_member:
                best = int(per_member(accuracy, splits["test"]).argmax())
                splits = {split: each.member(best) for split, each in splits.items()}
            if name.weights is not None:
                weights = averaging_weights(splits["validation"], name.weights)
                splits = {split: replace(each, weights=weights) for split, each in splits.items()}
            if calibrated:
                found[each.seed] = _calibrate(splits["test"], splits["validation"], name.of_mean_member)
            else:
                found[each.seed] = splits["test"]
        return found


def _remove_prefix(label: str, which: str) -> tuple[str, bool]:
    """Return the label that "WHICH of LABEL" is about, "ensemble" for WHICH alone, and whether it has this form."""
    found = label == which or label.startswith(f"{which} of ")
    return ("ensemble" if label == which else label.removeprefix(f"{which} of ")), found


def _look_up(tree: Any, path: Sequence[str]) -> float | None:
    """Follow keys of mappings; an element of a list is an index, one of `REDUCTIONS`, or key=value of its elements."""
    for word in path:
        if isinstance(tree, Mapping):
            tree = tree.get(word)
        elif not isinstance(tree, Sequence) or isinstance(tree, str):
            return None
        elif word in REDUCTIONS:
            tree = None if any(each is None for each in tree) else REDUCTIONS[word](tree)
        elif "=" in word:
            key, value = word.split("=")
            tree = next((each for each in tree if str(each[key]) == value), None)
        else:
            tree = tree[int(word)] if -len(tree) <= int(word) < len(tree) else None
    return float(tree) if isinstance(tree, int | float) and math.isfinite(tree) else None


def _calibrate(test: Predictions, validation: Predictions, of_mean_member: bool) -> Predictions:
    """Scale the ensemble, or each member separately, by the temperature fitted on the validation data."""
    if not of_mean_member:
        return apply_temperature(test, fit_temperature(validation))
    scaled = [
        apply_temperature(test.member(index), fit_temperature(validation.member(index)))
        for index in range(test.num_members)
    ]
    return Predictions(torch.cat([each.log_probs for each in scaled]), scaled[0].labels)
