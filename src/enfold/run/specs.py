"""Sections of a recipe: data, corruptions, trajectory and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from enfold.data import Data
from enfold.data import load as load_data
from enfold.data.corruptions import KINDS, SEVERITIES, STANDARD
from enfold.data.corruptions.suite import check_kind, check_severity

MAX_EXAMPLES = 10_000_000
Whole = Annotated[int, Field(strict=True)]
"""An integer; True and 2.0 are none."""
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_EXAMPLES)]
"""A number of examples, epochs or pixels."""
Number = Annotated[float, Field(strict=True)]

Family = Literal["ensemble", "distill", "merge"]
STARTS = ("best_member", "random", "average", "matched", "als")
"""Values of `init` that are not labels: the best member on validation data, fresh weights, the members' average, the
average after matching hidden units, and the nearest BatchEnsemble by alternating least squares."""


class DataSpec(BaseModel):
    """The data of a run: where they come from and how many examples are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(default="fashion-mini", description="Name of a data set, a path, or module:function.")
    train_size: Whole | Number | None = Field(default=None, description="Number or fraction of training examples.")
    val_size: Whole | Number | None = Field(default=None, description="Number or fraction of validation examples.")
    size: Count | None = Field(default=None, description="Images of a folder are resized to it.")
    seed: Whole = Field(default=0, description="Seed of the split.")
    exclude_classes: tuple[Whole, ...] = Field(default=(), description="Classes that are removed from all splits.")

    def load(self, *, download: bool = True) -> Data:
        """Return the data; the split does not depend on the run's seed."""
        options = {name: getattr(self, name) for name in type(self).model_fields if name != "source"}
        return load_data(self.source, download=download, **options)


class CorruptionSpec(BaseModel):
    """Corrupted copies of the test split on which all models are evaluated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str | None = Field(default=None, description="Folder of the official CIFAR-10-C or CIFAR-100-C files.")
    kinds: tuple[str, ...] | Literal["standard", "all"] = "standard"
    severities: tuple[Whole, ...] = SEVERITIES
    examples: Count | None = Field(default=None, description="Number of test examples; all by default.")
    seed: Whole = 0

    @field_validator("kinds", "severities")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        for each in () if isinstance(value, str) else value:
            (check_kind if isinstance(each, str) else check_severity)(each)
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the corruptions."""
        named = {"standard": STANDARD, "all": KINDS}
        return named[self.kinds] if isinstance(self.kinds, str) else self.kinds


class TrajectorySpec(BaseModel):
    """Which networks along the members' training are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: Count = Field(default=1, description="Epochs between two stored networks.")


class StepSpec(BaseModel):
    """One step of a recipe: a method with its options, which gives one row of the results.

    Keys that are not listed here are options of the method; `enfold methods NAME` describes them.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str = Field(description="Name of a method, or mine.py:my_method for code of your own.")
    label: str = Field(description="Name of the row; the method's name by default.")
    family: Family | None = Field(
        default=None, description="ensemble, distill or merge; needed if two methods have this name."
    )
    network: str | dict[str, Any] | None = Field(
        default=None,
        description="Ensembles: another network than the members', best_member, or the label of an earlier step.",
    )
    init: str | None = Field(
        default=None,
        description="Distillation: what the student starts from; repair: the network that is repaired. The label of an "
        f"earlier step, or one of {', '.join(STARTS)}.",
    )
    teacher: str | None = Field(
        default=None, description="Distillation: label of an earlier step; the members by default."
    )
    student: str | dict[str, Any] | None = Field(
        default=None, description="Distillation: a network, or an ensemble as {method: batch_ensemble, rank: 2}."
    )
    perturb: str | dict[str, Any] | None = Field(
        default=None, description="Distillation: a perturbation of the inputs."
    )
    train: dict[str, Any] = Field(default_factory=dict, description="Changes to the training settings of the run.")
    first: Count | None = Field(default=None, description="Merge or distill the first members only.")
    seeds: tuple[Whole, ...] | None = Field(
        default=None, description="Seeds of the run that have this step; all by default."
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method; `init` is one of them in ensembles, whose start is the key `network`."""
        own = {"init": self.init} if self.family == "ensemble" and self.init is not None else {}
        return {**(self.__pydantic_extra__ or {}), **own}


def add_labels(value: Any) -> Any:
    """Return a list of steps in which each is a mapping with a label; other values are left for validation."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    steps = [{"method": each} if isinstance(each, str) else each for each in value]
    return [{"label": default_label(each), **each} if isinstance(each, Mapping) else each for each in steps]


def default_label(step: Mapping[str, Any]) -> Any:
    """Return the label of a step that has none: its method's name, of a reference the part after the colon."""
    method = step.get("method")
    return method.rpartition(":")[2] if isinstance(method, str) else method
