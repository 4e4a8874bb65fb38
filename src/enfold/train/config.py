"""TrainConfig: the settings of training as plain values that can be written to a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from enfold.arguments import checked
from enfold.engines.precision import PRECISIONS, Precision
from enfold.errors import EnfoldError, closest
from enfold.tasks import Inferred, Task, TaskName, as_task

MOST = 1_000_000  # epochs and cycles; more are a typing error
LARGEST = 2**63 - 1  # an integer of PyTorch
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]  # in the range of float32
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
PerMember = float | tuple[float, ...]


@checked
@dataclass(frozen=True)
class TrainConfig:
    """Settings of `fit`. A tuple in place of a number gives every ensemble member its own value.

    Args:
        epochs: Passes over the training examples.
        batch_size: Examples per step and member.
        optimizer: The update rule.
        lr: Learning rate at the start of the schedule.
        momentum: Momentum of "sgd".
        nesterov: Use Nesterov momentum with "sgd".
        betas: Decay rates of the moment estimates of "adam" and "adamw".
        weight_decay: Weight decay: decoupled for "adamw", added to the gradient for "sgd" and "adam".
        decay: Which parameters are decayed: "all", or "weights" to exclude biases and normalization parameters.
        schedule: How the learning rate changes: "constant", "step" (multiplied by `step_factor` at each milestone) or
            "cosine" (annealed to `final_factor`).
        milestones: Milestones of the "step" schedule, as fractions of the epochs.
        step_factor: Factor on the learning rate at each milestone of the "step" schedule.
        final_factor: Final learning rate of the "cosine" schedule, as a fraction of `lr`.
        cycles: Number of cosine cycles (warm restarts).
        tail: What follows the schedule from `tail_start` on: "none", a "constant" learning rate, or a "triangular"
            cyclical one, as used for weight averaging.
        tail_start: Start of the tail, as a fraction of the epochs.
        tail_factor: Learning rate of the tail, as a fraction of `lr`; for "triangular" the maximum.
        tail_low: Minimum learning rate of a "triangular" tail, as a fraction of `lr`.
        tail_cycle: Length of one cycle of a "triangular" tail in epochs.
        warmup_epochs: Epochs of linear warmup before the schedule.
        label_smoothing: Label smoothing of the cross-entropy loss.
        clip_norm: Maximum gradient norm of each member; None for no clipping.
        order: Order of the training examples: "own" (a separate order for every member), "shared" (one order for all)
            or "split" (one order, with every batch divided among the members).
        bootstrap: Train every member on a bootstrap sample (bagging).
        folds: Train member k on all examples but those of fold k of this many (cross-validation), as
            `enfold.data.fold_numbers` returns them; None to train all members on all examples.
        augment: Augmentations applied to image batches, in this order: "pad-crop", "flip", "inception-crop".
        select: Which weights are returned: those of the epoch with the lowest validation NLL ("best", separately for
            every member of a deep ensemble), with the lowest validation NLL at a fitted temperature ("calibrated"; by
            NLL alone, networks that become overconfident are stopped early), or those of the last epoch ("last").
        ema: Decay per step of an exponential moving average of the weights, such as 0.999, which is evaluated and
            returned in place of the last weights; None for none.
        patience: Stop after this many epochs without a lower validation NLL; None to train for all epochs.
        precision: Precision of the forward and backward pass: "float32", or mixed precision with "bfloat16" or
            "float16" ("fp32", "bf16" and "fp16" are accepted as well).
        compile: Compile the network with `torch.compile`.
        task: What the outputs mean: "classification", "binary", "multilabel", "regression", a task of `enfold.tasks`
            with its options, or None to infer it from outputs and targets.
        device: Device to train on, such as "cpu" or "cuda".
        seed: Seed of data order, augmentation and dropout.
        first_member: Index of the first member. A single network trained with `first_member=k` sees the data exactly
            as member k of an ensemble does.
    """

    epochs: Annotated[int, Field(ge=0, le=MOST)] = 20
    batch_size: Annotated[int, Field(ge=1, le=LARGEST)] = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Rate | tuple[Rate, ...] = 1e-3
    momentum: BelowOne = 0.9
    nesterov: bool = True
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    weight_decay: NonNegative | tuple[NonNegative, ...] = 1e-2
    decay: Literal["all", "weights"] = "all"
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    milestones: tuple[Fraction, ...] = (0.3, 0.6, 0.8)
    step_factor: NonNegative = 0.2
    final_factor: NonNegative = 0.0
    cycles: Annotated[int, Field(ge=1, le=MOST)] = 1
    tail: Literal["none", "constant", "triangular"] = "none"
    tail_start: Fraction = 0.75
    tail_factor: NonNegative = 0.5
    tail_low: NonNegative = 0.005
    tail_cycle: Positive = 1.0
    warmup_epochs: NonNegative = 0.0
    label_smoothing: BelowOne | tuple[BelowOne, ...] = 0.0
    clip_norm: Positive | None = None
    order: Literal["own", "shared", "split"] = "own"
    bootstrap: bool = False
    folds: Annotated[int, Field(ge=2, le=LARGEST)] | None = None
    augment: tuple[str, ...] = ()
    select: Literal["best", "calibrated", "last"] = "best"
    ema: BelowOne | None = None
    patience: Annotated[int, Field(ge=1)] | None = None
    precision: Precision = "float32"
    compile: bool = False
    task: TaskName | Task | None = None
    device: str = "cpu"
    seed: int = 0
    first_member: Annotated[int, Field(ge=0, le=LARGEST)] = 0

    def __post_init__(self) -> None:
        as_task(self.task)  # refuses an unknown name
        object.__setattr__(self, "precision", PRECISIONS.get(self.precision, self.precision))
        self._require("warmup_epochs", self.warmup_epochs <= self.epochs, f"at most epochs = {self.epochs}")
        self._require("tail_low", self.tail_low <= self.tail_factor, f"at most tail_factor = {self.tail_factor}")
        self._require("folds", self.folds is None or not self.bootstrap, "None with bootstrap=True")
        self._require("patience", self.patience is None or self.select != "last", "None with select='last'")

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise EnfoldError(f"{field} must be {rule}, got {getattr(self, field)!r}: change {field}")

    def update(self, settings: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, given by name.

        Args:
            settings: Values by field name.

        Raises:
            EnfoldError: If a name is not a field of `TrainConfig`; the message suggests the closest one.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in settings:
            if name not in known:
                near = closest(name, known)
                suggestion = f", did you mean '{near}'?" if near else ""
                raise EnfoldError(f"TrainConfig has no setting '{name}'{suggestion}: choose from {', '.join(known)}")
        return dataclasses.replace(self, **settings) if settings else self

    def replace(self, **changes: object) -> TrainConfig:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def changes(self) -> dict[str, Any]:
        """Return the fields with another value than the default, and the seed, as plain values by name."""
        usual = TrainConfig()
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in found.items() if name == "seed" or value != getattr(usual, name)}
        if isinstance(self.task, Inferred):
            changed["task"] = self.task.argument
        if changed.get("task", "") is None:
            del changed["task"]
        return {name: repr(value) if isinstance(value, Task) else value for name, value in changed.items()}

    def per_member(self, field: str, num_members: int) -> list[float]:
        """Return one value per member; a single number is repeated.

        Raises:
            EnfoldError: If the field holds a tuple with another number of values.
        """
        value = getattr(self, field)
        if not isinstance(value, Sequence):
            return [float(value)] * num_members
        if len(value) != num_members:
            raise EnfoldError(
                f"{field} must be a number or have one value for each of the {num_members} members, got {len(value)} "
                f"values: change {field}"
            )
        return [float(each) for each in value]

    @property
    def varies(self) -> bool:
        """Return whether members have different learning rates or weight decays."""
        return isinstance(self.lr, tuple) or isinstance(self.weight_decay, tuple)

    def rate_factor(self, step: int, steps_per_epoch: int) -> float:
        """Return the factor on the learning rate at a step.

        Args:
            step: The step since the start of training, counted from 0.
            steps_per_epoch: Steps in one epoch.
        """
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
        """Return the factor some epochs after the start of the tail: constant, or a triangle wave."""
        if self.tail == "constant":
            return self.tail_factor
        place = epochs / self.tail_cycle % 1.0
        return self.tail_low + (self.tail_factor - self.tail_low) * abs(1 - 2 * place)


def as_config(config: TrainConfig | None) -> TrainConfig:
    """Return the settings, or the defaults for None.

    Raises:
        EnfoldError: If it is anything else.
    """
    if config is None:
        return TrainConfig()
    if not isinstance(config, TrainConfig):
        raise EnfoldError(f"config must be a TrainConfig, got {config!r}: pass TrainConfig(epochs=20)")
    return config
