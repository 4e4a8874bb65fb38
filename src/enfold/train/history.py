"""What training left behind: one record an epoch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Telling(Protocol):
    """A model that has figures of its own to tell after every epoch."""

    def figures(self) -> dict[str, float]:
        """Names and values."""


@dataclass(frozen=True)
class Epoch:
    """One epoch, one value a member."""

    epoch: int
    train_loss: list[float]
    validation_nll: list[float]
    validation_accuracy: list[float]
    ensemble_nll: float | None  # of the mean prediction on validation data
    learning_rate: float
    seconds: float
    steps: int = 0
    figures: dict[str, float] = field(default_factory=dict)  # of a model that is `Telling`


@dataclass
class History:
    """All epochs so far, and after how many each member's weights were taken (0: it is as it started)."""

    epochs: list[Epoch] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> History:
        """The inverse of `as_dict`."""
        return cls([Epoch(**epoch) for epoch in content["epochs"]], list(content["chosen"]))
