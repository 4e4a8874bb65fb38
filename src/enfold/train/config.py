"""TrainConfig: how to train, as plain values that can be written to a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from enfold.errors import EnfoldError, closest

PerMember = float | tuple[float, ...]


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A tuple instead of a number gives each member its own value in one vectorised run."""

    epochs: int = 20
    batch_size: int = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: PerMember = 1e-3
    momentum: float = 0.9  # sgd
    nesterov: bool = True  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adam, adamw
    weight_decay: PerMember = 1e-2  # sgd, adam: added to the gradient; adamw: decoupled
    decay: Literal["all", "weights"] = "all"  # "weights": not biases and norm parameters
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # step: fractions of the epochs
    step_factor: float = 0.2  # step: the learning rate is multiplied by it at each milestone
    final_factor: float = 0.0  # cosine: the learning rate ends at this fraction
    cycles: int = 1  # cosine: the schedule is gone through so many times
    tail: Literal["none", "constant", "triangular"] = "none"  # what follows the schedule, from tail_start on
    tail_start: float = 0.75  # fraction of the epochs
    tail_factor: float = 0.5  # of the learning rate; the top of a triangle
    tail_low: float = 0.005  # triangular: the bottom, as a fraction of the learning rate
    tail_cycle: float = 1.0  # triangular: epochs from top to top
    warmup_epochs: float = 0.0  # linear from 0, then the schedule
    label_smoothing: PerMember = 0.0
    clip_norm: float | None = None  # of each member's own gradient
    order: Literal["own", "shared", "split"] = "own"  # members see the data in their own order, in one, or a part each
    bootstrap: bool = False  # bagging
    augment: tuple[str, ...] = ()  # "pad-crop", "flip"
    select: Literal["best", "last"] = "best"  # each member's epoch with the lowest validation NLL, or the last
    patience: int | None = None  # stop a member after so many epochs without a better validation NLL
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    device: str = "cpu"
    seed: int = 0
    first_member: int = 0  # training member k alone, exactly as inside an ensemble: first_member=k

    def __post_init__(self) -> None:
        for field in ("milestones", "augment", "betas", "lr", "weight_decay", "label_smoothing"):
            value = getattr(self, field)
            if isinstance(value, list):
                object.__setattr__(self, field, tuple(value))
        self._require("epochs", isinstance(self.epochs, int) and self.epochs >= 0, "a whole number, 0 or more")
        self._require("batch_size", isinstance(self.batch_size, int) and self.batch_size >= 1, "a whole number above 0")
        self._require("lr", all(rate > 0 for rate in _all(self.lr)), "above 0")
        self._require("weight_decay", all(decay >= 0 for decay in _all(self.weight_decay)), "0 or more")
        self._require("label_smoothing", all(0 <= part < 1 for part in _all(self.label_smoothing)), "in [0, 1)")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self._require("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "two, in [0, 1)")
        self._require("clip_norm", self.clip_norm is None or self.clip_norm > 0, "above 0, or null for none")
        self._require("warmup_epochs", 0 <= self.warmup_epochs <= max(self.epochs, 0), "between 0 and the epochs")
        self._require("cycles", self.cycles >= 1, "1 or more")
        self._require("tail_start", 0 <= self.tail_start <= 1, "between 0 and 1")
        self._require("tail_factor", self.tail_factor >= 0, "0 or more")
        self._require("tail_low", 0 <= self.tail_low <= self.tail_factor, "between 0 and tail_factor")
        self._require("tail_cycle", self.tail_cycle > 0, "above 0")
        self._require("patience", self.patience is None or self.patience >= 1, "1 or more, or null for none")
        keeps_last = self.patience is not None and self.select == "last"
        self._require("patience", not keeps_last, "null where select is 'last', as it waits for a better epoch")
        for declared in dataclasses.fields(self):
            choices = _choices(str(declared.type))
            allowed = not choices or getattr(self, declared.name) in choices
            self._require(declared.name, allowed, f"one of {', '.join(choices)}")

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise EnfoldError(f"the plan's {field} must be {rule}, got {getattr(self, field)!r}: change {field}")

    def update(self, settings: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, given by name.

        Raises:
            EnfoldError: If a name is no field of `TrainConfig`; the message suggests the nearest one.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in settings:
            if name not in known:
                near = closest(name, known)
                suggestion = f", did you mean '{near}'?" if near else ""
                raise EnfoldError(f"TrainConfig has no setting '{name}'{suggestion}: choose from {', '.join(known)}")
        return dataclasses.replace(self, **settings) if settings else self

    def replace(self, **changes: object) -> TrainConfig:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def per_member(self, field: str, num_members: int) -> list[float]:
        """One value a member; a single number holds for all."""
        value = getattr(self, field)
        if not isinstance(value, Sequence):
            return [float(value)] * num_members
        if len(value) != num_members:
            raise EnfoldError(
                f"a plan with one {field} a member must have {num_members} values, got {len(value)}: "
                "pass a number, or one value for each member"
            )
        return [float(each) for each in value]

    @property
    def varies(self) -> bool:
        """Whether members are optimised with different values."""
        return isinstance(self.lr, tuple) or isinstance(self.weight_decay, tuple)

    def rate_factor(self, step: int, steps_per_epoch: int) -> float:
        """What multiplies the learning rate in step `step` of the whole training, counted from 0."""
        warmup = self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return min((step + 1) / warmup, 1.0)
        total = self.epochs * steps_per_epoch
        end = total if self.tail == "none" else self.tail_start * total
        if step >= end and self.tail != "none":
            return self._tail((step - end) / steps_per_epoch)
        if self.schedule == "cosine":
            progress = min((step - warmup) / max(end - warmup, 1), 1.0)  # a loader may yield more than its length says
            if self.cycles > 1 and progress < 1:
                progress = (step - warmup) * self.cycles / (end - warmup) % 1.0  # multiplied first: 15 / 22 * 22 < 15
            low = self.final_factor if self.tail == "none" else self.tail_factor
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
        if self.schedule == "step":
            passed = sum(step >= milestone * end for milestone in self.milestones)
            factor = float(self.step_factor**passed)
            return factor if self.tail == "none" else max(factor, self.tail_factor)
        return 1.0

    def _tail(self, epochs: float) -> float:
        """So many epochs after the schedule's end: one rate, or a triangle from tail_factor to tail_low and back."""
        if self.tail == "constant":
            return self.tail_factor
        place = epochs / self.tail_cycle % 1.0
        return self.tail_low + (self.tail_factor - self.tail_low) * abs(1 - 2 * place)


def _all(value: PerMember) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _choices(annotation: str) -> list[str]:
    if not annotation.startswith("Literal["):
        return []
    return [choice.strip("\"' ") for choice in annotation.removeprefix("Literal[").removesuffix("]").split(",")]
