"""Claims: what a paper says about its models, as data, judged by the stored predictions of a run."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from enfold.errors import EnfoldError
from enfold.metrics.bootstrap import BETWEEN_MEMBERS, BOOTSTRAPPED, Relation, Verdict, metric_value, paired_difference
from enfold.metrics.temperature import fit_temperature, tempered
from enfold.predictions import Predictions
from enfold.registry import nearest
from enfold.run.directory import RunDirectory
from enfold.run.execute import cells
from enfold.run.recipe import Recipe
from enfold.store import versions

MEAN_MEMBER = "mean member"  # of the run's own members; "mean member of LABEL" is that of a share's
NOT_RUN = "not run"
CALIBRATED = {f"c{name}": name for name in ("nll", "ece", "brier")}  # at the temperature fitted on validation data
FRACTIONS = ("accuracy", "ece", "cece", "disagreement")


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Data):
    """Where the published values are from."""

    paper: str
    table: str = ""


class Claim(_Data):
    """One ordering: the metric of the first row is above, or below, that of the second."""

    says: str = Field(min_length=1)
    metric: str
    first: str
    relation: Relation
    second: str
    source: str = ""  # where it is said, if not where the file says


class Claims(_Data):
    """The published values, by row and metric, which of the run's rows each is, and what is claimed of them."""

    source: Source
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    rows: dict[str, str]
    claims: tuple[Claim, ...] = Field(min_length=1)

    def value(self, row: str, metric: str) -> float | None:
        """The published value; None where the paper gives an ordering only."""
        return self.published.get(row, {}).get(metric)


def read_claims(path: Path) -> Claims:
    """The claims in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnfoldError(f"claims must be a readable YAML file, got '{path}' ({error}): check the path") from error
    return parse_claims(text, str(path))


def parse_claims(text: str, where: str = "the claims") -> Claims:
    """Claims from YAML text; every row, metric and value is checked."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise EnfoldError(f"'{where}' must be YAML, but it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EnfoldError(
            f"'{where}' must be a mapping of keys to values, got {type(content).__name__}: "
            f"the keys are {', '.join(Claims.model_fields)}"
        )
    try:
        claims = Claims.model_validate(content)
    except ValidationError as error:
        raise _explained(error, where) from error
    _check_published(claims, where)
    for index, claim in enumerate(claims.claims):
        _check_claim(claims, claim, f"{where}, claims.{index}")
    return claims


def judge(
    run: RunDirectory, recipe: Recipe, claims: Claims, *, replicates: int = 2000, level: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Every claim with the published values, the run's own, their difference and the verdict, as JSON can hold it.

    A claim about a row that a seed has no predictions of is not run. Predictions are read, never made.
    """
    if replicates < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"claims need at least 1 replicate and a level between 0 and 1, got {replicates} and {level}: "
            "2000 and 0.95 are usual"
        )
    evidence = _Evidence(run, recipe)
    judged = [_judged(evidence, claims, claim, replicates, level, seed) for claim in claims.claims]
    found = Counter(each["verdict"] for each in judged)
    return {
        "name": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(recipe.seeds),
        "versions": versions(),
        "source": claims.source.model_dump(),
        "bootstrap": {"replicates": replicates, "level": level, "seed": seed},
        "verdicts": {verdict: found[verdict] for verdict in (*get_args(Verdict), NOT_RUN)},
        "claims": judged,
    }


class _Evidence:
    """The stored test predictions of a run's rows, each file read once."""

    def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
        self._cells = cells(run, recipe)
        self._stored = cache(self._read)

    def row(self, label: str, metric: str) -> tuple[list[Predictions], bool] | None:
        """The predictions of every seed and whether the mean member is meant; None if a seed has none."""
        file, of_mean_member = _file_of(label)
        found = self._stored(file, metric in CALIBRATED, of_mean_member)
        return None if found is None else (found, of_mean_member)

    def _read(self, file: str, calibrated: bool, of_mean_member: bool) -> list[Predictions] | None:
        asked = [cell.run.read_predictions(file) for cell in self._cells]
        needed = {"test", "validation"} if calibrated else {"test"}
        found = [parts for parts in asked if parts is not None and parts.keys() >= needed]
        if len(found) < len(asked):
            return None
        if not calibrated:
            return [parts["test"] for parts in found]
        return [_at_its_temperature(parts["test"], parts["validation"], of_mean_member) for parts in found]


def _at_its_temperature(test: Predictions, validation: Predictions, of_mean_member: bool) -> Predictions:
    """The ensemble, or each member for itself, at the temperature that fits the validation data best."""
    if not of_mean_member:
        return tempered(test, fit_temperature(validation))
    members = range(test.num_members)
    each = [tempered(test.member(index), fit_temperature(validation.member(index))) for index in members]
    return Predictions(torch.cat([one.log_probs for one in each]), each[0].labels)


def _file_of(label: str) -> tuple[str, bool]:
    if label == MEAN_MEMBER:
        return "ensemble", True
    prefix = f"{MEAN_MEMBER} of "
    return (label.removeprefix(prefix), True) if label.startswith(prefix) else (label, False)


def _judged(
    evidence: _Evidence, claims: Claims, claim: Claim, replicates: int, level: float, seed: int
) -> dict[str, Any]:
    labels = [claims.rows[name] for name in (claim.first, claim.second)]
    rows = [evidence.row(label, claim.metric) for label in labels]
    sides = [
        {"row": name, "label": label, "published": claims.value(name, claim.metric), "ours": _ours(claim, row)}
        for name, label, row in zip((claim.first, claim.second), labels, rows, strict=True)
    ]
    content: dict[str, Any] = {
        "says": claim.says,
        "source": claim.source or claims.source.table,
        "metric": claim.metric,
        "relation": claim.relation,
        "first": sides[0],
        "second": sides[1],
    }
    first, second = rows
    if first is None or second is None:
        return {**content, "difference": None, "verdict": NOT_RUN}
    try:
        found = paired_difference(
            first[0],
            second[0],
            CALIBRATED.get(claim.metric, claim.metric),
            replicates=replicates,
            level=level,
            seed=seed,
            mean_member=(first[1], second[1]),
        )
    except EnfoldError as error:
        raise EnfoldError(f"the claim '{claim.says}' cannot be judged: {error}") from error
    difference = {**dataclasses.asdict(found), "values": list(found.values)}
    return {**content, "difference": difference, "verdict": found.verdict(claim.relation)}


def _ours(claim: Claim, row: tuple[Sequence[Predictions], bool] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    predictions, of_mean_member = row
    try:
        metric = CALIBRATED.get(claim.metric, claim.metric)
        values = [metric_value(metric, said, of_mean_member=of_mean_member) for said in predictions]
    except EnfoldError as error:
        raise EnfoldError(f"the claim '{claim.says}' cannot be judged: {error}") from error
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": values}


def _check_published(claims: Claims, where: str) -> None:
    for row, values in claims.published.items():
        _check_row(claims, row, f"{where}, published")
        for metric, value in values.items():
            _check_metric(metric, f"{where}, published.{row}")
            if metric in FRACTIONS and not 0 <= value <= 1:
                raise EnfoldError(
                    f"{where}, published.{row}: {metric} must be a fraction from 0 to 1, got {value:g}: "
                    f"write {value / 100:g} for {value:g} %"
                )


def _check_claim(claims: Claims, claim: Claim, where: str) -> None:
    _check_metric(claim.metric, where)
    for row in (claim.first, claim.second):
        _check_row(claims, row, where)
        if claim.metric in BETWEEN_MEMBERS and _file_of(claims.rows[row])[1]:
            raise EnfoldError(
                f"{where}: {claim.metric} compares members with one another, got it for '{row}', which is one member: "
                "name a row of several members"
            )
    if claims.rows[claim.first] == claims.rows[claim.second]:
        raise EnfoldError(
            f"{where}: a claim must compare two rows of the run, got '{claims.rows[claim.first]}' twice: change one"
        )
    first, second = (claims.value(row, claim.metric) for row in (claim.first, claim.second))
    if first is None or second is None:
        return
    if first == second or (first > second) != (claim.relation == "above"):
        raise EnfoldError(
            f"{where}: a claim must be what was published, got '{claim.relation}' for {claim.metric} {first:g} and "
            f"{second:g}: change the relation or the values"
        )


def _check_metric(metric: str, where: str) -> None:
    known = (*BOOTSTRAPPED, *CALIBRATED)
    if metric not in known:
        raise EnfoldError(
            f"{where}: a metric must be one of {', '.join(known)}, "
            f"got '{metric}'{nearest(metric, known) or ': choose one'}"
        )


def _check_row(claims: Claims, row: str, where: str) -> None:
    if row not in claims.rows:
        raise EnfoldError(
            f"{where}: a row must be one of those under rows, got '{row}'"
            f"{nearest(row, claims.rows) or ': add it there with the label of the run'}"
        )


def _explained(error: ValidationError, where: str) -> EnfoldError:
    """The first problem as one sentence with key, value and remedy."""
    first = error.errors()[0]
    *path, last = first["loc"]
    if first["type"] == "extra_forbidden":
        owners: dict[str, type[BaseModel]] = {"source": Source, "claims": Claim}
        owner = owners.get(str(path[0]) if path else "", Claims)
        known = list(owner.model_fields)
        return EnfoldError(
            f"{where}: there is no key '{last}'{nearest(str(last), known)}: the keys are {', '.join(known)}"
        )
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return EnfoldError(f"{where}: the key '{key}' is missing: add it")
    message = str(first["msg"]).removeprefix("Value error, ")
    return EnfoldError(f"{where}: '{key}' is wrong: {message}, got {str(first['input'])[:60]!r}: change it")
