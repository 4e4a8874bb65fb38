"""Reproduce: run a published table or figure at a chosen scale, and judge its claims by what was found."""

from __future__ import annotations

import json
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
from enfold.io.files import write_text
from enfold.report.page import plain
from enfold.report.reproduced import claims_csv, page, rows_csv
from enfold.run.analyses import Tree, analyse, draw
from enfold.run.claims import judge_by
from enfold.run.directory import RunDirectory
from enfold.run.evidence import MEAN_MEMBER, Evidence, Place
from enfold.run.execute import cells, execute
from enfold.run.published import Reproduction, Scale, claimed, recipes, reproduction, scale_of
from enfold.run.recipe import Recipe
from enfold.run.stages import Cell


@dataclass(frozen=True)
class Asked:
    """Which one, where and how."""

    name: str
    scale: str = "laptop"
    changes: tuple[str, ...] = ()  # of every recipe, as a.b=value
    only: tuple[str, ...] = ()  # of the table's runs these, * being any; all if left out
    device: str = "cpu"
    resume: bool = False
    trust_code: bool = False


def reproduce(asked: Asked, out: Path) -> dict[str, Any]:
    """Everything that is still to do of a table or figure, then its rows beside the published ones, and verdicts."""
    started = time.monotonic()
    wanted, chosen = reproduction(asked.name), scale_of(asked.name, asked.scale)
    made = _chosen(asked, recipes(asked.name, asked.scale, asked.changes))
    _require_data(asked, made)
    places = _checked(made, out, asked)
    with ExitStack() as locks:
        for place in places.values():
            locks.enter_context(place.writing())
        runs = {name: _one(place, made[name], asked) for name, place in places.items()}
        for run in runs.values():
            execute(run, run.recipe(), device=asked.device)
        own = {name: cells(run, run.recipe(), asked.device) for name, run in runs.items()}
        found, figures = _analysed(wanted, chosen, own, out)
    first = next(iter(own))
    everywhere = {**own, "": own[first], **{name: own[other] for name, other in chosen.instead.items() if other in own}}
    evidence = Evidence(everywhere, {name: found.get(_read_in(name, first, chosen), []) for name in everywhere})
    about = {
        "name": asked.name,
        "title": wanted.title,
        "scale": asked.scale,
        "changes": list(asked.changes),
        "only": list(asked.only),
        "seeds": list(made[first].seeds),
        "runs": {name: _told(runs[name], made[name], out) for name in made},
        "other_data": _other_data(asked, made),
        "instead": chosen.instead,
        "figures": figures,
        "rows": _rows(wanted, made, evidence),
    }
    judged = judge_by(evidence, wanted, about, replicates=chosen.replicates)
    content: dict[str, Any] = plain({**judged, "seconds": time.monotonic() - started})
    return content


def _analysed(
    wanted: Reproduction, chosen: Scale, own: Mapping[str, Sequence[Cell]], out: Path
) -> tuple[dict[str, list[Tree]], list[str]]:
    """What the analysis found, run by run and seed by seed, and the files of its figures."""
    found: dict[str, list[Tree]] = {}
    if wanted.analysis is None:
        return found, []
    settings = {**wanted.analysis.settings, **chosen.analysis}
    for name, seeds in own.items():
        found[name] = [{wanted.analysis.name: analyse(wanted.analysis.name, cell, settings)} for cell in seeds]
    return found, _drawn(wanted.analysis.name, own, found, out) if chosen.figures else []


def write(content: Mapping[str, Any], out: Path) -> list[Path]:
    """What was found as JSON, CSV and one HTML page, in the folder of the runs."""
    figures = {name: (out / name).read_bytes() for name in content["figures"]}
    name = content["name"]
    written = {
        f"{name}.json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
        f"{name}.csv": rows_csv(content),
        f"{name}.claims.csv": claims_csv(content),
        f"{name}.html": page(content, figures),
    }
    for file, text in written.items():
        write_text(out / file, text)
    return [out / file for file in written]


def _read_in(name: str, first: str, scale: Scale) -> str:
    return scale.instead.get(name, name or first)


def _told(run: RunDirectory, recipe: Recipe, out: Path) -> dict[str, Any]:
    network = recipe.network if isinstance(recipe.network, str) else dict(recipe.network)
    return {
        "path": str(run.path.relative_to(out)),
        "data": recipe.data.model_dump(),
        "network": network,
        "members": recipe.members,
        "seeds": list(recipe.seeds),
        "plan": recipe.plan,
    }


def _other_data(asked: Asked, made: Mapping[str, Recipe]) -> dict[str, list[str]]:
    """The published data set and the one that the user took, of every run where it was changed."""
    meant, published = recipes(asked.name, asked.scale), recipes(asked.name, "paper")
    return {
        run: [published.get(run, meant[run]).data.source, recipe.data.source]
        for run, recipe in made.items()
        if recipe.data.source != meant[run].data.source
    }


def _chosen(asked: Asked, made: Mapping[str, Recipe]) -> Mapping[str, Recipe]:
    found = {name: recipe for name, recipe in made.items() if any(fnmatch(name, each) for each in asked.only or ("*",))}
    if not found:
        raise EnfoldError(
            f"only must name runs of '{asked.name}', got {', '.join(asked.only)}: they are {', '.join(made)}"
        )
    return found


def _require_data(asked: Asked, made: Mapping[str, Recipe]) -> None:
    present = {row.name: row.present for row in catalogue()}
    for recipe in made.values():
        source = recipe.data.source
        if not present.get(source, True):
            raise EnfoldError(
                f"'{asked.name}' at the scale {asked.scale} needs the data set {source}, which is not on this machine: "
                f"get it with  enfold data {source} --fetch  or put its files where  enfold data {source} --check  "
                "says, or take --scale smoke, which needs none"
            )


def _checked(made: Mapping[str, Recipe], out: Path, asked: Asked) -> dict[str, RunDirectory]:
    """A folder a run; nothing is written yet."""
    places = {name: RunDirectory(out / recipe.name, trust_code=asked.trust_code) for name, recipe in made.items()}
    for name, other in combinations(made, 2):
        if places[name].path == places[other].path:
            raise EnfoldError(
                f"every run must have a folder of its own, got '{made[name].name}' for both {name} and {other}: "
                "leave --set name out"
            )
    for place in places.values():
        if place.manifest_file.exists() and not asked.resume:
            raise EnfoldError(
                f"'{place.path}' already holds a run: add --resume to go on with it, or choose another folder"
            )
    for name, place in places.items():
        place.require_trust(made[name])
        if not place.recipe_file.exists():
            cells(place, made[name], asked.device)[0].check()
    return places


def _one(place: RunDirectory, recipe: Recipe, asked: Asked) -> RunDirectory:
    """The run; names that have one in common add their rows to it."""
    if place.recipe_file.exists():
        known = place.recipe()
        more = {
            key: (*getattr(known, key), *(each for each in getattr(recipe, key) if each not in getattr(known, key)))
            for key in ("shares", "folds")
        }
        labels = [each.label for key in more for each in more[key]]
        both = known.model_copy(update={**more, "corruptions": known.corruptions or recipe.corruptions})
        if both != known and both.extends(recipe) and len(set(labels)) == len(labels):
            place.write_recipe(both)
    return RunDirectory.create(place.path, recipe, resume=asked.resume, trust_code=asked.trust_code)


def _drawn(analysis: str, own: Mapping[str, Sequence[Any]], found: Mapping[str, list[Tree]], out: Path) -> list[str]:
    """The figures of the first seed of each run; none without the package that draws."""
    try:
        drawn = [path for name, seeds in own.items() for path in draw(analysis, seeds[0], found[name][0][analysis])]
    except MissingExtra:
        return []
    return [str(path.relative_to(out)) for path in drawn]


def _rows(wanted: Reproduction, made: Mapping[str, Recipe], evidence: Evidence) -> list[dict[str, Any]]:
    """Every row that is published or made, with each metric as published and as ours."""
    named = (*(metric for values in wanted.published.values() for metric in values), *_judged(wanted))
    metrics = list(dict.fromkeys(named))
    listed = dict.fromkeys((*wanted.rows, *wanted.published, *claimed(wanted), *_own_rows(wanted, made)))
    rows = []
    for row in listed:
        place = Place.of(wanted.label(row))
        own = [claim.metric for claim in wanted.claims if row in (claim.first, claim.second)]
        asked = dict.fromkeys((*wanted.published.get(row, ()), *own)) if place.path else metrics
        values = {
            metric: {"published": wanted.value(row, metric), "ours": _ours(evidence, wanted.label(row), metric)}
            for metric in asked
        }
        if any(each["published"] is not None or each["ours"] is not None for each in values.values()):
            rows.append({"run": place.run, "row": row, "label": wanted.label(row), "metrics": values})
    return rows


def _judged(wanted: Reproduction) -> Iterator[str]:
    """Metrics of claims about models, not about what an analysis found."""
    yield from (claim.metric for claim in wanted.claims if not Place.of(wanted.label(claim.first)).path)


def _ours(evidence: Evidence, label: str, metric: str) -> dict[str, Any] | None:
    try:
        found = evidence.row(label, metric)
    except EnfoldError:  # a metric that the row cannot have, as the diversity of one network
        return None
    return None if found is None else found.as_dict()


def _own_rows(wanted: Reproduction, made: Mapping[str, Recipe]) -> Iterator[str]:
    """One network and controls, which not every paper has, and methods that no row names."""
    places = [Place.of(wanted.label(row)) for row in (*wanted.rows, *wanted.published, *claimed(wanted))]
    named = {MEAN_MEMBER if each.of_mean_member and each.file == "ensemble" else each.file for each in places}
    for run, recipe in made.items():
        for label in (MEAN_MEMBER, "control", *(each.label for each in (*recipe.shares, *recipe.folds))):
            if label not in named:
                yield f"{run}/{label}"
