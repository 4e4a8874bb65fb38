"""Evidence: the numbers that runs have stored of a row, seed by seed.

A row is a label of the run, "mean member", "mean member of LABEL" or "ensemble of K"; of one run among several it is
"RUN/LABEL", and a number that an analysis of it found "RUN/ANALYSIS/PLACE/IN/IT", such as fashion/alignment/rows/0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from enfold.metrics.bootstrap import metric_value
from enfold.metrics.predictions import Predictions
from enfold.metrics.temperature import fit_temperature, tempered
from enfold.run.stages import Cell

MEAN_MEMBER = "mean member"  # of the run's own members; "mean member of LABEL" is that of a share's
CALIBRATED = {f"c{name}": name for name in ("nll", "ece", "brier")}  # at the temperature fitted on validation data
CORRUPTED = {f"corrupted {name}": name for name in ("accuracy", "nll", "ece")}  # the mean over kinds and severities
SOME = re.compile(r"ensemble of (\d+)")  # the first so many members
WORDS: dict[str, Callable[[Sequence[Any]], Any]] = {  # which of a list, at a place in what an analysis found
    "first": lambda each: each[0],
    "middle": lambda each: each[len(each) // 2],
    "last": lambda each: each[-1],
    "ends": lambda each: (each[0] + each[-1]) / 2,
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}


@dataclass(frozen=True)
class Place:
    """Where a row's numbers are: in predictions of a run, or in what an analysis of it found."""

    run: str
    file: str
    first: int | None = None  # of its members
    of_mean_member: bool = False
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str) -> Place:
        """Read a row of a run."""
        run, *words = label.split("/") if "/" in label else ("", label)
        if len(words) > 1:
            return cls(run, words[0], path=tuple(words[1:]))
        file, prefix = words[0], f"{MEAN_MEMBER} of "
        of_mean_member = file == MEAN_MEMBER or file.startswith(prefix)
        file = "ensemble" if file == MEAN_MEMBER else file.removeprefix(prefix)
        some = SOME.fullmatch(file)
        return cls(run, "ensemble" if some else file, int(some[1]) if some else None, of_mean_member)


@dataclass(frozen=True)
class Row:
    """A metric of one row in every seed that has it, and the predictions that it is of, if it is of any."""

    values: list[float]
    seeds: tuple[int, ...]
    said: list[Predictions] | None = None
    of_mean_member: bool = False

    def of(self, seeds: Collection[int]) -> Row:
        """The same of these seeds alone."""
        kept = [index for index, seed in enumerate(self.seeds) if seed in seeds]
        return replace(
            self,
            values=[self.values[index] for index in kept],
            seeds=tuple(self.seeds[index] for index in kept),
            said=None if self.said is None else [self.said[index] for index in kept],
        )

    def as_dict(self) -> dict[str, Any]:
        """Mean and deviation over seeds, as JSON holds them."""
        deviation = statistics.stdev(self.values) if len(self.values) > 1 else None
        return {"mean": statistics.fmean(self.values), "std": deviation, "values": self.values}


class Evidence:
    """What runs have stored, by name, "" being the only or first one; predictions are read once.

    `found` holds what analyses of a run found, as trees of numbers, a list over its seeds.
    """

    def __init__(
        self, runs: Mapping[str, Sequence[Cell]], found: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    ) -> None:
        self._runs, self._found = runs, found or {}
        self._stored = cache(self._read)

    def row(self, label: str, metric: str) -> Row | None:
        """A metric of a row; None if a seed lacks it."""
        place = Place.of(label)
        if place.run not in self._runs:
            return None
        seeds = tuple(cell.seed for cell in self._cells(place))
        if place.path or metric in CORRUPTED:
            of_seeds = [_at(tree, place.path) for tree in self._trees(place, metric)]
            numbers = [each for each in of_seeds if each is not None]
            return Row(numbers, seeds) if numbers and len(numbers) == len(of_seeds) else None
        said = self._stored(place, metric in CALIBRATED)
        if said is None:
            return None
        name = CALIBRATED.get(metric, metric)
        values = [metric_value(name, each, of_mean_member=place.of_mean_member) for each in said]
        return Row(values, seeds, said, place.of_mean_member)

    def _cells(self, place: Place) -> list[Cell]:
        """The seeds that have the row, or that ought to."""
        run = self._runs[place.run]
        missing = {fold.label: fold.seeds for fold in run[0].recipe.folds if fold.seeds is not None} if run else {}
        return [cell for cell in run if cell.seed in missing.get(place.file, (cell.seed,))]

    def _trees(self, place: Place, metric: str) -> list[Any]:
        if place.path:
            return [tree.get(place.file) for tree in self._found.get(place.run, ())]
        label = MEAN_MEMBER if place.of_mean_member and place.file == "ensemble" else place.file
        own = self._cells(place)
        stored = [cell.run.path / "results.json" for cell in own]
        if place.first is not None or not all(file.is_file() for file in stored):
            return []
        rows = [cell.run.read_json("results.json")["rows"] for cell in own]
        return [(each.get(label, {}).get("corrupted") or {}).get(CORRUPTED[metric]) for each in rows]

    def _read(self, place: Place, calibrated: bool) -> list[Predictions] | None:
        asked = [cell.run.read_predictions(place.file) for cell in self._cells(place)]
        needed = {"test", "validation"} if calibrated else {"test"}
        found = [parts for parts in asked if parts is not None and parts.keys() >= needed]
        if len(found) < len(asked) or (place.first or 1) > min(each["test"].num_members for each in found):
            return None
        if place.first is not None:
            some = range(place.first)
            found = [{part: said.subset(some) for part, said in parts.items()} for parts in found]
        if not calibrated:
            return [parts["test"] for parts in found]
        return [_at_its_temperature(parts["test"], parts["validation"], place.of_mean_member) for parts in found]


def _at(tree: Any, path: Sequence[str]) -> float | None:
    """The number at a place: keys of mappings; of lists a number, one of `WORDS`, or key=value of what is in them."""
    for word in path:
        if isinstance(tree, Mapping):
            tree = tree.get(word)
        elif not isinstance(tree, Sequence) or isinstance(tree, str):
            return None
        elif word in WORDS:
            tree = None if any(each is None for each in tree) else WORDS[word](tree)
        elif "=" in word:
            key, value = word.split("=")
            tree = next((each for each in tree if str(each[key]) == value), None)
        else:
            tree = tree[int(word)] if -len(tree) <= int(word) < len(tree) else None
    return float(tree) if isinstance(tree, int | float) and math.isfinite(tree) else None


def _at_its_temperature(test: Predictions, validation: Predictions, of_mean_member: bool) -> Predictions:
    """The ensemble, or each member for itself, at the temperature that fits the validation data best."""
    if not of_mean_member:
        return tempered(test, fit_temperature(validation))
    members = range(test.num_members)
    each = [tempered(test.member(index), fit_temperature(validation.member(index))) for index in members]
    return Predictions(torch.cat([one.log_probs for one in each]), each[0].labels)
