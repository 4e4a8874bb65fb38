"""What a page or a card is made from: everything that is stored of one run, read and compared, nothing drawn yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from enfold.metrics import ReliabilityBand, RiskCoverage
from enfold.metrics.predictions import Predictions

ONE = "mean member"  # the row that all others are compared with
ONE_MEMBER = "one member"  # where a mean over members makes no sense, as in a diagram
History = Mapping[str, Any]  # what `enfold.train.history.History.as_dict` gave


@dataclass(frozen=True)
class Difference:
    """A metric of one row minus that of another: the mean over seeds and its bootstrap interval."""

    mean: float
    lower: float
    upper: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.lower > 0 or self.upper < 0


@dataclass(frozen=True)
class Training:
    """One training of a run, finished or under way."""

    stage: str  # members/members, folds/NAME, ...
    seed: int
    seconds: float | None  # None: it is not finished
    epochs: int | None = None  # by its plan
    history: History | None = None

    @property
    def done(self) -> int:
        """How many epochs are over."""
        return len(self.history["epochs"]) if self.history else 0

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the epochs so far; None where nothing is known."""
        if self.seconds is not None or not self.history or not self.done or self.epochs is None:
            return None
        pace = sum(epoch["seconds"] for epoch in self.history["epochs"]) / self.done
        return float(pace * max(0, self.epochs - self.done))


@dataclass(frozen=True)
class Seed:
    """One seed of the run."""

    seed: int
    folder: Path
    predictions: Mapping[str, Mapping[str, Predictions]]  # label -> part -> what the model said
    corrupted: Mapping[str, Any] | None = None
    ood: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Headline:
    """The one network that the run ends with, beside what it is to be compared with."""

    label: str
    candidates: int  # from which it was chosen by validation data
    members: int  # how many networks' answers it gives: 1 for a network
    control: str | None
    to_control: Difference | None  # in NLL
    accuracy_gain: float | None  # recovered; None where the ensemble has none beyond noise


@dataclass(frozen=True)
class Example:
    """One test example on which two models differ."""

    index: int
    truth: int
    distance: float  # total variation, from 0 to 1
    first: Tensor  # (C,) probabilities of the ensemble
    second: Tensor  # (C,) of the fold
    image: Tensor | None = None  # (C, H, W) uint8


@dataclass(frozen=True)
class Examples:
    """Where the ensemble and a fold differ most."""

    label: str
    seed: int
    total: int
    names: tuple[str, ...]
    examples: tuple[Example, ...]
    notice: str = ""  # why there are no images


@dataclass(frozen=True)
class Doubt:
    """What models say of their own certainty, for one seed, by model."""

    seed: int
    bands: Mapping[str, ReliabilityBand]
    coverage: Mapping[str, RiskCoverage]
    score: str  # by which images from outside are told
    outside: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]  # set -> model -> of test images, of those from outside
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
    controls: Mapping[str, str] = field(default_factory=dict)  # fold -> its control
    headline: Headline | None = None
    examples: Examples | None = None
    doubt: Doubt | None = None
    trust: str = ""  # behind commands that go on with the run, where it is of code of the user's own

    @property
    def rows(self) -> Mapping[str, Any]:
        """The models of the run by name."""
        rows: Mapping[str, Any] = self.summary["rows"]
        return rows
