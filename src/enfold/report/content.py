"""The content of a page or a model card: all stored results of one run, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from enfold.metrics import ReliabilityBand, RiskCoverage
from enfold.report.metric_columns import criterion_of, metric_title

ONE = "mean member"  # the row that all others are compared with
ONE_MEMBER = "one member"  # where a mean over members is not defined, as in a reliability diagram
History = Mapping[str, Any]  # the result of `enfold.train.history.History.as_dict`


@dataclass(frozen=True)
class Difference:
    """A metric of one row minus that of another: the mean over seeds and its bootstrap interval."""

    mean: float
    lower: float
    upper: float

    @property
    def beyond_noise(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.lower > 0 or self.upper < 0


@dataclass(frozen=True)
class Training:
    """One training of a run, finished or in progress."""

    stage: str  # members/members, steps/NAME, ...
    seed: int
    seconds: float | None  # None while it is in progress
    epochs: int | None = None  # of its configuration
    history: History | None = None

    @property
    def done(self) -> int:
        """Return the number of finished epochs."""
        return len(self.history["epochs"]) if self.history else 0

    @property
    def seconds_left(self) -> float | None:
        """Return the remaining time at the speed of the epochs so far, or None if it is unknown."""
        if self.seconds is not None or not self.history or not self.done or self.epochs is None:
            return None
        pace = sum(epoch["seconds"] for epoch in self.history["epochs"]) / self.done
        return float(pace * max(0, self.epochs - self.done))


@dataclass(frozen=True)
class Seed:
    """One seed of the run."""

    seed: int
    folder: Path
    predictions: Mapping[str, Mapping[str, Any]]  # label -> split -> predictions
    corrupted: Mapping[str, Any] | None = None
    ood: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Headline:
    """The selected network of a run and what it is compared with."""

    label: str
    candidates: int  # from which it was selected on validation data
    members: int  # 1 for a network
    control: str | None
    to_control: Difference | None  # in the criterion
    accuracy_gain: float | None  # recovered; None where the gain of the ensemble is within noise


@dataclass(frozen=True)
class Example:
    """One test example for which the predictions of two models differ."""

    index: int
    truth: int
    distance: float  # total variation, from 0 to 1
    first: Tensor  # (C,) probabilities of the ensemble
    second: Tensor  # (C,) of the network
    image: Tensor | None = None  # (C, H, W) uint8


@dataclass(frozen=True)
class Examples:
    """The test examples for which the predictions of the ensemble and a network differ most."""

    label: str
    seed: int
    total: int
    names: tuple[str, ...]
    examples: tuple[Example, ...]
    notice: str = ""  # why there are no images


@dataclass(frozen=True)
class Uncertainty:
    """Calibration, selective prediction and OOD detection of one seed, by model."""

    seed: int
    bands: Mapping[str, ReliabilityBand]
    coverage: Mapping[str, RiskCoverage]
    score: str  # by which OOD inputs are detected
    ood: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]  # set -> model -> scores of test inputs and of OOD inputs
    roc: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]  # set -> model -> false, true positive rates by that score


@dataclass(frozen=True)
class Content:
    """One run."""

    name: str
    folder: Path
    summary: Mapping[str, Any]  # as in summary.json; no rows while nothing is evaluated
    recipe: str
    versions: Mapping[str, str]
    seeds: tuple[Seed, ...]
    trainings: tuple[Training, ...] = ()
    differences: Mapping[str, Mapping[str, Difference]] = field(
        default_factory=dict
    )  # row -> metric -> minus the mean member
    controls: Mapping[str, str] = field(default_factory=dict)  # step -> its control
    headline: Headline | None = None
    examples: Examples | None = None
    uncertainty: Uncertainty | None = None
    trust: str = ""  # appended to commands that continue a run with user code

    @property
    def table(self) -> Mapping[str, Any]:
        """Return the summary for tables: with one seed, the ensemble's row has the bootstrap interval of its gain."""
        gain = self.differences.get("ensemble", {}).get(self.criterion)
        if gain is None or len(self.summary["seeds"]) > 1:
            return self.summary
        ensemble = {**self.rows["ensemble"], "gain_interval": (gain.lower, gain.upper)}
        return {**self.summary, "rows": {**self.rows, "ensemble": ensemble}}

    @property
    def criterion(self) -> str:
        """Return the metric by which models are compared: "nll", or that of another task."""
        return criterion_of(self.rows)

    @property
    def loss(self) -> str:
        """Return the name of the criterion in texts."""
        return metric_title(self.criterion)

    @property
    def unit(self) -> str:
        """Return the unit of the criterion with its name, such as "nats of NLL"."""
        return f"nats of {self.loss}" if self.criterion == "nll" else f"of {self.loss}"

    @property
    def single_members(self) -> list[str]:
        """Return the labels of networks that have the weights of one member."""
        return [label for label, row in self.rows.items() if "member" in row]

    @property
    def rows(self) -> Mapping[str, Any]:
        """Return the results of each model by name."""
        rows: Mapping[str, Any] = self.summary["rows"]
        return rows
