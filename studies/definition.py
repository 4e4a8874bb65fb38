"""Definitions: one YAML file for each published table or figure, with its claims and the recipes that make its rows.

`studies/PAPER/NAME.yaml` names base recipes in `studies/recipes`, which are written for the laptop scale. Changes are
applied in this order: base recipe, run, scale of the base recipe, scale of the definition, `--set`. In a change,
mappings are merged, and the entries of `steps` are selected by label, with * as a wildcard.

The same table in another regime is a definition that `extends` the first and has its own runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from enfold.data import catalogue
from enfold.errors import EnfoldError
from enfold.registry import suggest
from enfold.run.directory import RunDirectory
from enfold.run.override import apply_override
from enfold.run.recipe import Recipe, make_recipe
from enfold.run.yaml_text import read_yaml, write_yaml
from studies.claims import Claims, StrictModel, evaluate_run, parse_as, read_claims
from studies.evidence import RowName

ROOT = Path(__file__).parent
RECIPES = ROOT / "recipes"
ScaleName = Literal["smoke", "laptop", "paper"]
SCALES: tuple[ScaleName, ...] = get_args(ScaleName)
REPLACED = ("network",)  # replaced instead of merged, because its arguments depend on its name


class RunSpec(StrictModel):
    """One run of a table."""

    recipe: str  # a file in studies/recipes
    rows: tuple[str, ...] | None = None  # labels of the recipe's steps; all by default
    change: dict[str, Any] = Field(default_factory=dict)
    like: str | None = None  # a run whose published values hold for this one too


class Scale(StrictModel):
    """The size of the experiment and the time it needs."""

    time: str
    change: dict[str, Any] = Field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)  # changes of single runs, by name or pattern
    only: tuple[str, ...] = ()  # names of runs; all by default
    rows: tuple[str, ...] = ("*",)  # labels of steps
    substitutes: dict[str, str] = Field(default_factory=dict)  # a run that is not made: the run used instead
    analysis: dict[str, Any] = Field(default_factory=dict)  # settings
    figures: bool = True
    replicates: int = 2000  # of the bootstrap


class Analysis(StrictModel):
    """An analysis that is computed for every run."""

    name: Literal["alignment", "landscape", "theory"]
    settings: dict[str, Any] = Field(default_factory=dict)


class Definition(Claims):
    """A published table or figure: its claims, and the runs on which they are evaluated."""

    title: str
    regime: str = ""  # one sentence
    extends: str | None = None  # a table whose published values, rows and claims hold for this one too
    runs: dict[str, RunSpec] = Field(min_length=1)
    scales: dict[ScaleName, Scale]
    analysis: Analysis | None = None
    metrics: tuple[str, ...] = ()  # columns beside those of claims and published values
    cost: bool = False  # whether a row has its parameters, operations and latency, relative to one network


def _files() -> dict[str, Path]:
    found = {path.stem: path for path in ROOT.glob("*/*.yaml") if path.parent != RECIPES}
    return dict(sorted(found.items()))


def list_names() -> list[str]:
    """Return the names of all tables and figures."""
    return list(_files())


def resolve_names(name: str) -> list[str]:
    """Return the tables of a paper, or the one table of that name."""
    files = _files()
    of_paper = [table for table, path in files.items() if path.parent.name == name]
    if not of_paper and name not in files:
        known = sorted({*files, *(path.parent.name for path in files.values())})
        raise EnfoldError(f"a study must be one of {', '.join(known)}, got '{name}'{suggest(name, known)}")
    return of_paper or [name]


def results_file(name: str) -> Path:
    """Return the path of the stored results of a table."""
    return _files()[name].parent / "results" / f"{name}.json"


def stored_names() -> list[str]:
    """Return the names of the tables and figures with stored results."""
    return [name for name in list_names() if results_file(name).is_file()]


@cache
def load_definition(name: str) -> Definition:
    """Read and check the definition of a table or figure."""
    known = list_names()
    if name not in known:
        raise EnfoldError(f"a table must be one of {', '.join(known)}, got '{name}'{suggest(name, known)}")
    definition = parse_as(Definition, _read_extended(name), f"{name}.yaml")
    rows = (*definition.rows, *definition.published, *claimed_rows(definition))
    unknown = {RowName.parse(definition.label(row)).run for row in rows} - {"", *definition.runs}
    if unknown:
        raise EnfoldError(f"{name}.yaml: a row must belong to a run, got '{min(unknown)}': add it under runs")
    published = dict(definition.published)
    for run, spec in definition.runs.items():
        for row, values in definition.published.items():
            if spec.like is not None and row.startswith(f"{spec.like}/"):
                published[f"{run}/{row.removeprefix(f'{spec.like}/')}"] = values
    return definition.model_copy(update={"published": published})


def _read_extended(name: str) -> str:
    """Return the text of a definition; published values, rows and claims of the table that it extends come first."""
    text = _files()[name].read_text(encoding="utf-8")
    own = read_yaml(text)
    base = own.get("extends") if isinstance(own, dict) else None
    if base is None:
        return text
    if base not in _files() or base == name:
        raise EnfoldError(f"{name}.yaml: extends must be another table, got '{base}'{suggest(str(base), _files())}")
    known = read_yaml(_files()[base].read_text(encoding="utf-8"))
    for key in ("published", "rows"):
        own[key] = {**known.get(key, {}), **own.get(key, {})}
    own["claims"] = [*known["claims"], *own.get("claims", [])]
    own.setdefault("source", known["source"])
    return write_yaml(own)


def evaluate_existing(run: RunDirectory, name: str) -> dict[str, Any]:
    """Evaluate the claims of a table, or of a YAML file of claims, on a run that exists already."""
    if name not in list_names():
        return evaluate_run(run, run.recipe(), read_claims(Path(name)))
    definition, recipe = load_definition(name), run.recipe()
    return evaluate_run(run, recipe, definition, runs=_runs_of(definition, recipe.name, name))


def _runs_of(definition: Definition, recipe_name: str, name: str) -> list[str]:
    """Return the run with that recipe name, or the only one of the laptop scale, and those it substitutes."""
    substitutes = definition.scales["laptop"].substitutes
    made = {run: f"{run}-{spec.recipe}" for run, spec in definition.runs.items() if run not in substitutes}
    chosen = [run for run in made if made[run] == recipe_name] or list(made)
    if len(chosen) > 1:
        raise EnfoldError(
            f"'{name}' has several runs, and the recipe's name must be that of one of them, got '{recipe_name}': "
            f"pass a run of the recipe {' or '.join(made.values())}"
        )
    return [*chosen, *(run for run, other in substitutes.items() if other == chosen[0])]


def claimed_rows(claims: Claims) -> Iterator[str]:
    """Yield the rows that claims compare."""
    for claim in claims.claims:
        yield from (claim.first, claim.second)


@cache
def make_recipes(name: str, scale: str, changes: tuple[str, ...] = ()) -> Mapping[str, Recipe]:
    """Return the recipe of every run of a table at a scale, with changes given as key.key=value."""
    recipes = {}
    for run, content in _contents(name, scale).items():
        for change in changes:
            apply_override(content, change)
        recipes[run] = make_recipe(content, f"{name} at the scale {scale}")
    return recipes


def _contents(name: str, scale: str) -> dict[str, dict[str, Any]]:
    chosen, contents = get_scale(name, scale), {}
    for run, spec in load_definition(name).runs.items():
        if run in chosen.substitutes or (chosen.only and run not in chosen.only):
            continue
        base = read_yaml((RECIPES / f"{spec.recipe}.yaml").read_text(encoding="utf-8"))
        content = {"name": f"{run}-{spec.recipe}", **base["recipe"]}
        of_run = [change for pattern, change in chosen.runs.items() if fnmatch(run, pattern)]
        for change in (spec.change, base["scales"].get(scale, {}), chosen.change, *of_run):
            content = merge_change(content, change)
        content["steps"] = _select_steps(content.get("steps", []), spec.rows, chosen.rows)
        contents[run] = content
    return contents


def _select_steps(
    steps: list[dict[str, Any]], labels: tuple[str, ...] | None, patterns: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the steps with these labels and patterns, and the earlier steps that they start from."""
    selected: set[str] = set()
    for step in reversed(steps):
        label = step["label"]
        chosen = (labels is None or label in labels) and any(fnmatch(label, pattern) for pattern in patterns)
        if chosen or label in selected:
            selected |= {label, str(step.get("init"))}
    return [step for step in steps if step["label"] in selected]


def merge_change(content: Any, change: Any) -> Any:
    """Return the content of a recipe with a change applied; the content itself is not modified."""
    if isinstance(content, list) and isinstance(change, Mapping):
        for pattern, own in change.items():
            content = [merge_change(each, own) if fnmatch(each["label"], pattern) else each for each in content]
        return content
    if not isinstance(content, Mapping) or not isinstance(change, Mapping):
        return change
    merged = {key: value if key in REPLACED else merge_change(content.get(key), value) for key, value in change.items()}
    return {**content, **merged}


def list_studies() -> list[dict[str, Any]]:
    """Return every table with title, paper and, for each scale, the time and whether its data sets are present."""
    present = {row.name: row.present for row in catalogue()}
    rows = []
    for name in list_names():
        definition, scales = load_definition(name), {}
        for scale, chosen in definition.scales.items():
            sources = sorted({content["data"]["source"] for content in _contents(name, scale).values()})
            scales[scale] = {"time": chosen.time, "data": {each: present[each] for each in sources}}
        rows.append({"name": name, "title": definition.title, "paper": definition.source.paper, "scales": scales})
    return rows


def get_scale(name: str, scale: str) -> Scale:
    """Return the settings of a table at a scale."""
    if scale not in SCALES:
        raise EnfoldError(f"a scale must be one of {', '.join(SCALES)}, got '{scale}'{suggest(scale, SCALES)}")
    return load_definition(name).scales[scale]
