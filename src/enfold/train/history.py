"""What training left behind: one record an epoch."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from enfold.errors import UnchangedWarning, level_outside


@runtime_checkable
class Telling(Protocol):
    """A model that has figures of its own to tell after every epoch."""

    def figures(self) -> dict[str, float]:
        """Names and values."""


@dataclass(frozen=True)
class Epoch:
    """One epoch, one value a member."""

    epoch: int  # counted from 0; -1: before the first
    train_loss: list[float]
    validation_nll: list[float]
    validation_accuracy: list[float]
    ensemble_nll: float | None  # of the mean prediction on validation data
    lr: float
    seconds: float
    steps: int = 0
    figures: dict[str, float] = field(default_factory=dict)  # of a model that is `Telling`


@dataclass
class History:
    """All epochs so far, and after how many each member's weights were taken (0: it is as it started)."""

    epochs: list[Epoch] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    start: Epoch | None = None  # epoch 0 in `chosen`: the scores before training, where an epoch is chosen by them

    @property
    def unchanged(self) -> list[int]:
        """The members whose weights are those they started from, although they were trained."""
        return [index for index, epoch in enumerate(self.chosen) if epoch == 0] if self.epochs else []

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> History:
        """The inverse of `as_dict`."""
        start = content.get("start")
        return cls(
            [Epoch(**epoch) for epoch in content["epochs"]],
            list(content["chosen"]),
            None if start is None else Epoch(**start),
        )


def warn_if_unchanged(history: History, what: str, start: str, remedy: str) -> None:
    """Warn with `UnchangedWarning` if a training returned the weights that it started from.

    Args:
        history: The history of the training.
        what: The name of the method, for the message.
        start: What the training started from, such as "member 2".
        remedy: What to try instead.
    """
    unchanged, count = history.unchanged, len(history.chosen)
    if not unchanged:
        return
    which = "" if count == 1 else f" for students {', '.join(map(str, unchanged))} of {count}"
    warnings.warn(
        f"{what} returned its start, {start}, unchanged{which}: no epoch had a lower NLL on validation data; {remedy}",
        UnchangedWarning,
        stacklevel=level_outside(),
    )
