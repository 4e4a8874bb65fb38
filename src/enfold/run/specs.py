"""What a recipe is made of: its data, shares, folds and what they are judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from enfold.data import Data
from enfold.data import load as load_data
from enfold.data.corruptions import KINDS, SEVERITIES, STANDARD
from enfold.data.corruptions.suite import check_kind, check_severity


class DataSpec(BaseModel):
    """Where the data comes from and how much of it is used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = "fashion-mini"
    train_size: int | float | None = None
    val_size: int | float | None = None
    size: int | None = None  # images of a folder are resized to it
    seed: int = 0
    exclude_classes: tuple[int, ...] = ()  # left out of all parts, the others numbered anew

    def load(self, *, download: bool = True) -> Data:
        """The data; the same split wherever it is asked for."""
        chosen = {name: getattr(self, name) for name in type(self).model_fields if name != "source"}
        return load_data(self.source, download=download, **chosen)


class CorruptionSpec(BaseModel):
    """Corrupted copies of the test part on which all models are scored too, enfold's own or the official ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str | None = None  # of the official CIFAR-10-C or CIFAR-100-C, in place of enfold's own
    kinds: tuple[str, ...] | Literal["standard", "all"] = "standard"
    severities: tuple[int, ...] = SEVERITIES
    examples: int | None = Field(default=None, ge=1)  # so many of the test part; all if left out
    seed: int = 0  # of enfold's own

    @field_validator("kinds", "severities")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for each in () if isinstance(value, str) else value:
            (check_kind if isinstance(each, str) else check_severity)(each)
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds by name."""
        named = {"standard": STANDARD, "all": KINDS}
        return named[self.kinds] if isinstance(self.kinds, str) else self.kinds


class TrajectorySpec(BaseModel):
    """Which networks that the members' training passes through are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=1, ge=1)  # epochs


class MethodSpec(BaseModel):
    """A method, the name of its row, and its settings; `plan` changes the members' plan."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str
    label: str
    plan: dict[str, Any] = Field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What is given to the method beside its plan."""
        return dict(self.__pydantic_extra__ or {})


class FoldSpec(MethodSpec):
    """One fold of the members, and what follows it."""

    first: int | None = Field(default=None, ge=1)  # of the first so many members; of all if left out
    seeds: tuple[int, ...] | None = None  # of the run, that have this fold, as where it takes long; all if left out
    then: tuple[MethodSpec, ...] = ()  # steps: repair, or a distillation, which starts from the network before it

    @field_validator("then", mode="before")
    @classmethod
    def _steps_by_name(cls, value: Any) -> Any:
        return labelled(value)

    @property
    def steps(self) -> tuple[MethodSpec, ...]:
        """The fold itself, then what follows it."""
        return (self, *self.then)


def labelled(value: Any) -> Any:
    """Methods that are given by name as mappings, each with the label that its row has."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    listed = [{"method": each} if isinstance(each, str) else each for each in value]
    return [{"label": each.get("method"), **each} if isinstance(each, Mapping) else each for each in listed]


class ShareSpec(MethodSpec):
    """One share, trained beside the members: from a fresh network, or on from the best member."""

    from_member: bool = False
    network: str | dict[str, Any] | None = None  # another than the members'
