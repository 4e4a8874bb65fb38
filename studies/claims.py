"""Claims: the orderings that a paper reports, written as data and evaluated on the results of our runs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from enfold.errors import EnfoldError
from enfold.metrics.bootstrap import BETWEEN_MEMBERS, BOOTSTRAPPED, Relation, Verdict
from enfold.registry import suggest
from enfold.run.directory import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.recipe import Recipe
from enfold.run.yaml_text import read_text, read_yaml
from enfold.saving import versions
from studies.evidence import CALIBRATED, CORRUPTED, Evidence, Row, RowName
from studies.intervals import Comparison, compare, holm, student_interval

NOT_RUN = "not run"
OWN = ("a control, not in ", "an identity, ")  # beginnings of the source of a claim that is not the paper's
FRACTIONS = ("accuracy", "ece", "cece", "disagreement", "corrupted accuracy", "corrupted ece")


class StrictModel(BaseModel):
    """The content of a file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(StrictModel):
    """The origin of the published values."""

    paper: str
    table: str = ""


class Claim(StrictModel):
    """One ordering: the metric of the first row is above, or below, that of the second."""

    statement: str = Field(min_length=1)
    metric: str
    first: str
    relation: Relation
    second: str
    source: str = ""  # if it differs from the source of the file
    runs: tuple[str, ...] = ()  # the claim is made for each of these runs; first and second are labels in them


class Claims(StrictModel):
    """Published values by row and metric, the run's label for each row, and the claims about them."""

    source: Source
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    rows: dict[str, str] = Field(default_factory=dict)  # published row: label; a name with a / is its own label
    claims: tuple[Claim, ...] = Field(min_length=1)

    def value(self, row: str, metric: str) -> float | None:
        """Return the published value, or None where the paper gives an ordering only."""
        return self.published.get(row, {}).get(metric)

    def label(self, row: str) -> str:
        """Return the label of a row in the run."""
        return self.rows.get(row, row)


Kind = TypeVar("Kind", bound=Claims)


def read_claims(path: Path) -> Claims:
    """Read claims from a YAML file."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise EnfoldError(f"claims must be a readable YAML file, got '{path}' ({error}): check the path") from error
    return parse_claims(text, str(path))


def parse_claims(text: str, where: str = "the claims") -> Claims:
    """Parse claims from YAML text and check every row, metric and value."""
    return parse_as(Claims, text, where)


def parse_as(kind: type[Kind], text: str, where: str) -> Kind:
    """Parse YAML text as claims, or as a subclass with further keys."""
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        raise EnfoldError(f"'{where}' must be YAML, but it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EnfoldError(
            f"'{where}' must be a mapping of keys to values, got {type(content).__name__}: "
            f"the keys are {', '.join(kind.model_fields)}"
        )
    try:
        claims = kind.model_validate(content)
    except ValidationError as error:
        raise _explain(error, where, kind) from error
    claims = claims.model_copy(update={"claims": tuple(one for each in claims.claims for one in _expand_runs(each))})
    _check_published(claims, where)
    for index, claim in enumerate(claims.claims):
        _check_claim(claims, claim, f"{where}, claims.{index}")
    return claims


def _expand_runs(claim: Claim) -> list[Claim]:
    """Return one claim for each of its runs."""
    if not claim.runs:
        return [claim]
    return [
        claim.model_copy(
            update={
                "statement": f"{run}: {claim.statement}",
                "first": f"{run}/{claim.first}",
                "second": f"{run}/{claim.second}",
                "runs": (),
            }
        )
        for run in claim.runs
    ]


def evaluate_run(
    run: RunDirectory,
    recipe: Recipe,
    claims: Claims,
    *,
    runs: Sequence[str] = (),
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate claims on one run; stored predictions are read, nothing is computed by a network.

    Args:
        run: A run with stored predictions.
        recipe: The recipe of the run.
        claims: What to evaluate. A claim about a row that a seed has no predictions for is "not run".
        runs: Names of runs in the claims that this run is used for.
        replicates: Number of bootstrap samples.
        level: Coverage of the confidence interval.
        seed: Seed of the bootstrap.

    Returns:
        Every claim with the published values, ours, their difference and the verdict, ready for JSON.
    """
    evidence = Evidence(dict.fromkeys(("", *runs), seed_runs(run, recipe)))
    about = {"name": recipe.name, "seeds": list(recipe.seeds)}
    return evaluate_claims(evidence, claims, about, replicates=replicates, level=level, seed=seed)


def evaluate_claims(
    evidence: Evidence,
    claims: Claims,
    about: Mapping[str, Any],
    *,
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate claims on the stored results of several runs; the entries of `about` come first in the result."""
    if replicates < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"claims need replicates >= 1 and a level between 0 and 1, got {replicates} and {level}: "
            "the defaults are 2000 and 0.95"
        )
    evaluated = [_evaluate(evidence, claims, claim, replicates, level, seed) for claim in claims.claims]
    _correct(evaluated, level)
    return {
        **about,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "source": claims.source.model_dump(),
        "bootstrap": {"replicates": replicates, "level": level, "seed": seed},
        "interval": "Student's, from the variance between seeds and that of the test set",
        "verdicts": _count(each["verdict"] for each in evaluated),
        "published_verdicts": _count(each["verdict"] for each in evaluated if is_published(each)),
        "published_verdicts_holm": _count(each["verdict_holm"] for each in evaluated if is_published(each)),
        "claims": evaluated,
    }


def is_published(claim: Mapping[str, Any]) -> bool:
    """Return whether an evaluated claim is one of the paper, and not one of ours."""
    return not str(claim["source"]).startswith(OWN)


def _count(verdicts: Iterable[str]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in (*get_args(Verdict), NOT_RUN)}


def _correct(evaluated: Sequence[dict[str, Any]], level: float) -> None:
    """Add to each claim p by Holm's method over the paper's claims, and over ours, and the verdict with it."""
    for chosen in (True, False):
        group = [each for each in evaluated if is_published(each) is chosen and each["difference"] is not None]
        values = [math.nan if each["difference"]["p"] is None else each["difference"]["p"] for each in group]
        for each, adjusted in zip(group, holm(values), strict=True):
            each["difference"]["p_holm"] = None if math.isnan(adjusted) else adjusted
    for each in evaluated:
        found = each["difference"]
        sure = found is None or (found["p_holm"] is not None and found["p_holm"] < 1 - level)
        each["verdict_holm"] = each["verdict"] if sure else "within noise"


def _evaluate(
    evidence: Evidence, claims: Claims, claim: Claim, replicates: int, level: float, seed: int
) -> dict[str, Any]:
    labels = [claims.label(name) for name in (claim.first, claim.second)]
    try:
        first, second = (evidence.row(label, claim.metric) for label in labels)
        difference = None
        common = set(first.seeds) & set(second.seeds) if first is not None and second is not None else set()
        if first is not None and second is not None and common:
            pair = first.select(common), second.select(common)
            difference = _difference(*pair, claim.metric, replicates, level, seed)
    except EnfoldError as error:
        raise EnfoldError(f"the claim '{claim.statement}' cannot be evaluated: {error}") from error
    sides = [
        {
            "row": name,
            "label": label,
            "published": claims.value(name, claim.metric),
            "ours": None if row is None else row.as_dict(),
        }
        for name, label, row in zip((claim.first, claim.second), labels, (first, second), strict=True)
    ]
    content: dict[str, Any] = {
        "statement": claim.statement,
        "source": claim.source or claims.source.table,
        "metric": claim.metric,
        "relation": claim.relation,
        "first": sides[0],
        "second": sides[1],
    }
    if difference is None:
        return {**content, "difference": None, "verdict": NOT_RUN}
    numbers = {
        key: value if isinstance(value, tuple) or math.isfinite(value) else None
        for key, value in dataclasses.asdict(difference).items()
    }
    numbers["values"] = list(difference.values)
    return {**content, "difference": numbers, "verdict": difference.verdict(claim.relation)}


def _difference(first: Row, second: Row, metric: str, replicates: int, level: float, seed: int) -> Comparison:
    """Return the interval over seeds and examples if predictions are stored, else Student's interval over seeds."""
    if first.predictions is None or second.predictions is None:
        values = [one - other for one, other in zip(first.values, second.values, strict=True)]
        return student_interval(values, 0.0, level)
    return compare(
        first.predictions,
        second.predictions,
        CALIBRATED.get(metric, metric),
        replicates=replicates,
        level=level,
        seed=seed,
        mean_member=(first.of_mean_member, second.of_mean_member),
    )


def _check_published(claims: Claims, where: str) -> None:
    for row, values in claims.published.items():
        _check_row(claims, row, f"{where}, published")
        for metric, value in values.items():
            if not RowName.parse(claims.label(row)).path:
                _check_metric(metric, f"{where}, published.{row}")
            if metric in FRACTIONS and not 0 <= value <= 1:
                raise EnfoldError(
                    f"{where}, published.{row}: {metric} must be a fraction from 0 to 1, got {value:g}: "
                    f"write {value / 100:g} for {value:g} %"
                )


def _check_claim(claims: Claims, claim: Claim, where: str) -> None:
    for row in (claim.first, claim.second):
        _check_row(claims, row, where)
        name = RowName.parse(claims.label(row))
        if not name.path:
            _check_metric(claim.metric, where)
        if claim.metric in BETWEEN_MEMBERS and name.of_mean_member:
            raise EnfoldError(
                f"{where}: {claim.metric} compares members with one another, got it for '{row}', which is one member: "
                "name a row of several members"
            )
    if claims.label(claim.first) == claims.label(claim.second):
        raise EnfoldError(
            f"{where}: a claim must compare two rows of the run, got '{claims.label(claim.first)}' twice: change one"
        )
    first, second = (claims.value(row, claim.metric) for row in (claim.first, claim.second))
    if first is None or second is None:
        return
    if first == second or (first > second) != (claim.relation == "above"):
        raise EnfoldError(
            f"{where}: a claim must agree with the published values, got '{claim.relation}' for {claim.metric} "
            f"{first:g} and {second:g}: change the relation or the values"
        )


def _check_metric(metric: str, where: str) -> None:
    known = (*BOOTSTRAPPED, *CALIBRATED, *CORRUPTED)
    if metric not in known:
        raise EnfoldError(
            f"{where}: a metric must be one of {', '.join(known)}, "
            f"got '{metric}'{suggest(metric, known) or ': choose one'}"
        )


def _check_row(claims: Claims, row: str, where: str) -> None:
    if row not in claims.rows and "/" not in row:
        raise EnfoldError(
            f"{where}: a row must be one of those under rows, got '{row}'"
            f"{suggest(row, claims.rows) or ': add it there with the label of the run'}"
        )


def _explain(error: ValidationError, where: str, kind: type[Claims]) -> EnfoldError:
    """Return the first problem as one sentence with key, value and remedy."""
    first = error.errors()[0]
    *path, last = first["loc"]
    if first["type"] == "extra_forbidden":
        owners: dict[str, type[BaseModel]] = {"source": Source, "claims": Claim}
        owner = owners.get(str(path[0]) if path else "", kind)
        known = list(owner.model_fields)
        return EnfoldError(
            f"{where}: there is no key '{last}'{suggest(str(last), known)}: the keys are {', '.join(known)}"
        )
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return EnfoldError(f"{where}: the key '{key}' is missing: add it")
    message = str(first["msg"]).removeprefix("Value error, ")
    return EnfoldError(f"{where}: '{key}' is wrong: {message}, got {str(first['input'])[:60]!r}: change it")
