"""Published: tables and figures as files, one each, with what is said of them and the recipes to make them anew.

Files lie in enfold/reproduce, and their recipes, written at the laptop scale, in enfold/reproduce/recipes. Later ones
change earlier ones: recipe, run, the recipe's scale, the file's scale, the user's own changes. In a change, mappings
are merged and methods of a list are named by label, * being any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from enfold.data import catalogue
from enfold.errors import EnfoldError
from enfold.registry import nearest
from enfold.run.claims import Claims, Written, judge, parse_as, read_claims
from enfold.run.directory import RunDirectory
from enfold.run.evidence import Place
from enfold.run.override import apply_override
from enfold.run.recipe import Recipe, make_recipe
from enfold.run.yaml_text import read_yaml

ScaleName = Literal["smoke", "laptop", "paper"]
SCALES: tuple[ScaleName, ...] = get_args(ScaleName)
WHOLE = ("network",)  # what is replaced, not merged: its arguments belong to its name


class RunSpec(Written):
    """One run of a table."""

    recipe: str  # a file of recipes
    rows: tuple[str, ...] | None = None  # of the recipe's shares and folds these; all if left out
    change: dict[str, Any] = Field(default_factory=dict)
    like: str | None = None  # what is published of that run is of this one too


class Scale(Written):
    """How much is done, and how long it takes."""

    takes: str
    change: dict[str, Any] = Field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)  # changes of single runs, * being any
    only: tuple[str, ...] = ()  # of the runs these; all if left out
    rows: tuple[str, ...] = ("*",)  # of their shares and folds these
    instead: dict[str, str] = Field(default_factory=dict)  # a run that is not made, and which is read in its place
    analysis: dict[str, Any] = Field(default_factory=dict)  # settings
    figures: bool = True
    replicates: int = 2000  # of the bootstrap


class Analysis(Written):
    """What else is computed of every run."""

    name: Literal["alignment", "landscape"]
    settings: dict[str, Any] = Field(default_factory=dict)


class Reproduction(Claims):
    """A published table or figure: claims, and how to make what they are judged by."""

    title: str
    runs: dict[str, RunSpec] = Field(min_length=1)
    scales: dict[ScaleName, Scale]
    analysis: Analysis | None = None


def _room() -> Traversable:
    return files("enfold").joinpath("reproduce")


def names() -> list[str]:
    """All that can be reproduced."""
    return sorted(file.name.removesuffix(".yaml") for file in _room().iterdir() if file.name.endswith(".yaml"))


@cache
def reproduction(name: str) -> Reproduction:
    """The file of that name, checked."""
    known = names()
    if name not in known:
        raise EnfoldError(f"what is reproduced must be one of {', '.join(known)}, got '{name}'{nearest(name, known)}")
    found = parse_as(Reproduction, _room().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    named = {Place.of(found.label(row)).run for row in (*found.rows, *found.published, *claimed(found))}
    unknown = named - {"", *found.runs}
    if unknown:
        raise EnfoldError(f"{name}.yaml: a row must be of a run, got '{min(unknown)}': add it under runs")
    published = dict(found.published)
    for run, spec in found.runs.items():
        for row, values in found.published.items():
            if spec.like is not None and row.startswith(f"{spec.like}/"):
                published[f"{run}/{row.removeprefix(f'{spec.like}/')}"] = values
    return found.model_copy(update={"published": published})


def judge_file(run: RunDirectory, file: Path) -> dict[str, Any]:
    """Claims of a file, or of what has that name here, judged by a run."""
    if str(file) not in names():
        return judge(run, run.recipe(), read_claims(file))
    found, recipe = reproduction(str(file)), run.recipe()
    return judge(run, recipe, found, runs=_stands_for(found, recipe.name, str(file)))


def _stands_for(found: Reproduction, called: str, name: str) -> list[str]:
    """The run of that name, or the only one that a laptop makes, and those that are held against it there."""
    instead = found.scales["laptop"].instead
    made = {run: f"{run}-{spec.recipe}" for run, spec in found.runs.items() if run not in instead}
    own = [run for run in made if made[run] == called] or list(made)
    if len(own) > 1:
        raise EnfoldError(
            f"'{name}' is of several runs, of which this must be one by its name, got '{called}': take a run that is "
            f"called {' or '.join(made.values())}"
        )
    return [*own, *(run for run, other in instead.items() if other == own[0])]


def claimed(found: Claims) -> Iterator[str]:
    """The rows that claims are of."""
    for claim in found.claims:
        yield from (claim.first, claim.second)


@cache
def recipes(name: str, scale: str, changes: tuple[str, ...] = ()) -> Mapping[str, Recipe]:
    """The recipe of every run that is made at that scale, with the user's own changes as a.b=value."""
    found = {}
    for run, content in _contents(name, scale).items():
        for change in changes:
            apply_override(content, change)
        found[run] = make_recipe(content, f"{name} at the scale {scale}")
    return found


def _contents(name: str, scale: str) -> dict[str, dict[str, Any]]:
    chosen, found = scale_of(name, scale), {}
    for run, spec in reproduction(name).runs.items():
        if run in chosen.instead or (chosen.only and run not in chosen.only):
            continue
        base = read_yaml(_room().joinpath("recipes", f"{spec.recipe}.yaml").read_text(encoding="utf-8"))
        content = {"name": f"{run}-{spec.recipe}", **base["recipe"]}
        own = [change for pattern, change in chosen.runs.items() if fnmatch(run, pattern)]
        for change in (spec.change, base["scales"].get(scale, {}), chosen.change, *own):
            content = merged(content, change)
        for key in ("shares", "folds"):
            listed = [each for each in content.get(key, ()) if spec.rows is None or each["label"] in spec.rows]
            content[key] = [each for each in listed if any(fnmatch(each["label"], row) for row in chosen.rows)]
        found[run] = content
    return found


def merged(content: Any, change: Any) -> Any:
    """What a change makes of a recipe's content."""
    if isinstance(content, list) and isinstance(change, Mapping):
        found = content
        for pattern, own in change.items():
            found = [merged(each, own) if fnmatch(each["label"], pattern) else each for each in found]
        return found
    if not isinstance(content, Mapping) or not isinstance(change, Mapping):
        return change
    inner = {key: value if key in WHOLE else merged(content.get(key), value) for key, value in change.items()}
    return {**content, **inner}


def listing() -> list[dict[str, Any]]:
    """Every name with what it is, and for each scale the time it takes, the data it needs and whether that is here."""
    present = {row.name: row.present for row in catalogue()}
    rows = []
    for name in names():
        found, scales = reproduction(name), {}
        for scale, chosen in found.scales.items():
            sources = sorted({content["data"]["source"] for content in _contents(name, scale).values()})
            scales[scale] = {"takes": chosen.takes, "data": {each: present[each] for each in sources}}
        rows.append({"name": name, "title": found.title, "paper": found.source.paper, "scales": scales})
    return rows


def scale_of(name: str, scale: str) -> Scale:
    """How much is done at that scale."""
    if scale not in SCALES:
        raise EnfoldError(f"a scale must be one of {', '.join(SCALES)}, got '{scale}'{nearest(scale, SCALES)}")
    return reproduction(name).scales[scale]
