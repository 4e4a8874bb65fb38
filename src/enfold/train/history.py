"""Training history: one record per epoch."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from enfold.display import CONTROL, ENSEMBLE, MEMBER, axes_or_new, html_table
from enfold.errors import EnfoldError, UnchangedWarning, level_outside


@runtime_checkable
class HasFigures(Protocol):
    """A model that reports metrics of its own after every epoch."""

    def figures(self) -> dict[str, float]:
        """Return values by name."""


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch, with one value per member.

    It is what a function passed as ``on_epoch=`` is called with, in `fit`, `distill`, `train_control`, `compress` and
    merges that train.

    Args:
        epoch: Index, counted from 0; -1 for the state before training.
        train_loss: Mean training loss.
        validation_loss: The criterion of the task on validation examples, such as NLL; without targets, the divergence
            from the teacher of a distillation.
        validation_score: The score of the task on validation examples, such as accuracy.
        ensemble_loss: The criterion of the mean prediction; None for a single network.
        lr: Learning rate at the end of the epoch.
        seconds: Duration.
        steps: Number of optimizer steps.
        figures: Metrics reported by the model.
        ensemble_score: The score of the mean prediction; None for a single network.
        training: In calls of `on_epoch`, the title of the training, as one call may train several; otherwise empty.
        calibrated_loss: The validation NLL at a fitted temperature or scale, with select="calibrated"; empty otherwise,
            and for tasks without an NLL.
    """

    epoch: int
    train_loss: list[float]
    validation_loss: list[float]
    validation_score: list[float]
    ensemble_loss: float | None
    lr: float
    seconds: float
    steps: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    ensemble_score: float | None = None
    training: str = ""
    calibrated_loss: list[float] = field(default_factory=list)

    @property
    def selected_by(self) -> list[float]:
        """The values by which epochs are selected, lower is better."""
        return self.calibrated_loss or self.validation_loss


@dataclass(repr=False)
class History:
    """All epochs of a training; a notebook shows them as a table.

    Args:
        epochs: The epochs so far.
        chosen: For each member, the number of epochs after which its weights were taken; 0 for the initial weights.
        start: Scores before training, where epochs are selected.
        criterion: The metric in `validation_loss`; lower is better.
        score: The metric in `validation_score`.
    """

    epochs: list[Epoch] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    start: Epoch | None = None
    criterion: str = "nll"
    score: str = "accuracy"

    @property
    def unchanged(self) -> list[int]:
        """Members whose returned weights are their initial ones, although they were trained."""
        return [index for index, epoch in enumerate(self.chosen) if epoch == 0] if self.epochs else []

    def metrics(self, record: Epoch) -> dict[str, float]:
        """Return the values of an epoch by the names that loggers show.

        `train/loss`, `val/nll`, `val/accuracy` and `lr`, with the criterion and the score of the task. For an ensemble
        `val/` is its mean prediction, `member_0/` each member and `mean_member/` their mean.
        """
        single = len(record.validation_loss) == 1
        whole = {"nll": record.validation_loss[0], "score": record.validation_score[0]} if single else {}
        whole |= {} if record.ensemble_loss is None else {"nll": record.ensemble_loss}
        whole |= {} if record.ensemble_score is None else {"score": record.ensemble_score}
        names = {"loss": "train/loss", "nll": f"val/{self.criterion}", "score": f"val/{self.score}"}
        found = {"train/loss": _mean(record.train_loss)} if record.train_loss else {}
        found |= {names[key]: value for key, value in whole.items()}
        lists = {"loss": record.train_loss, "nll": record.validation_loss, "score": record.validation_score}
        for key, values in lists.items():
            if len(values) > 1:
                found |= {} if key == "loss" else {f"mean_member/{names[key]}": _mean(values)}
                found |= {f"member_{index}/{names[key]}": value for index, value in enumerate(values)}
        found |= {f"model/{name.replace(' ', '_')}": value for name, value in record.figures.items()}
        return found | ({"lr": record.lr, "epoch_seconds": record.seconds} if record.epoch >= 0 else {})

    def plot(self, metric: str | None = None, axes: Any = None) -> Any:
        """Draw a metric of the validation examples by epoch: a thin line for each member, a thick one for their mean.

        Args:
            metric: The criterion or the score of the task, such as "nll" or "accuracy"; None for the criterion beside
                the mean training loss.
            axes: Axes of matplotlib to draw on; None for a new figure.

        Returns:
            The axes; `axes.figure.savefig(file)` stores the figure.

        Raises:
            EnfoldError: If the training had no epochs or does not have the metric.
            MissingExtra: If matplotlib is missing.
        """
        shown = metric or self.criterion
        if shown not in (self.criterion, self.score):
            raise EnfoldError(f"metric must be {self.criterion} or {self.score}, got {metric!r}: change metric")
        if not self.epochs:
            raise EnfoldError("a history must have epochs to be drawn, got none: train first")
        axes = axes_or_new(axes)
        records = [*([self.start] if self.start else ()), *self.epochs]
        rows = [(record.epoch + 1, self.metrics(record)) for record in records]
        members = range(max(len(record.validation_loss) for record in records))
        for index in members if len(members) > 1 else ():
            look = {"color": MEMBER, "lw": 0.9, "label": None if index else "members"}
            _draw(axes, rows, f"member_{index}/val/{shown}", look)
        _draw(axes, rows, f"val/{shown}", {"color": ENSEMBLE, "lw": 2, "label": f"validation {shown}"})
        if metric is None:
            _draw(axes, rows, "train/loss", {"color": CONTROL, "lw": 1.2, "ls": "--", "label": "training loss"})
        axes.set_xlabel("epoch")
        axes.set_ylabel(shown)
        axes.legend(frameon=False)
        return axes

    def rows(self, most: int = 12) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table with at most so many epochs, evenly spaced, with the last."""
        count = len(self.epochs)
        indices = sorted({count - 1 - round(step * (count - 1) / (most - 1)) for step in range(most)}) if count else []
        records = [*([self.start] if self.start else ()), *(self.epochs[index] for index in indices)]
        names = list(dict.fromkeys(name for record in records for name in self.metrics(record)))
        names = [name for name in names if not name.startswith("member_")]
        found = []
        for record in records:
            values = self.metrics(record)
            found.append([str(record.epoch + 1), *(f"{values[n]:.4g}" if n in values else "" for n in names)])
        return ["epoch", *names], found

    def __repr__(self) -> str:
        if not self.epochs:
            return "History of 0 epochs"
        values = self.metrics(self.epochs[-1])
        shown = [name for name in ("train/loss", f"val/{self.criterion}", f"val/{self.score}") if name in values]
        return f"History of {len(self.epochs)} epochs: " + "  ".join(f"{name} {values[name]:.4g}" for name in shown)

    def _repr_html_(self) -> str:
        return html_table(*self.rows(), repr(self))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> History:
        """Invert `as_dict`."""
        start = content.get("start")
        return cls(
            [Epoch(**epoch) for epoch in content["epochs"]],
            list(content["chosen"]),
            None if start is None else Epoch(**start),
            content.get("criterion", "nll"),
            content.get("score", "accuracy"),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _draw(axes: Any, rows: list[tuple[int, dict[str, float]]], name: str, look: dict[str, Any]) -> None:
    """Draw a value of the epochs that have it."""
    points = [(epoch, values[name]) for epoch, values in rows if name in values]
    if points:
        axes.plot(*zip(*points, strict=True), marker="." if len(points) == 1 else "", **look)


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
    criterion = history.criterion.upper() if history.criterion in ("nll", "mse") else history.criterion
    message = f"{describe_unchanged(what, start + which, criterion)}; {remedy}"
    warnings.warn(message, UnchangedWarning, stacklevel=level_outside())


def describe_unchanged(what: str, start: str, criterion: str = "loss") -> str:
    """Return the sentence about a training that returned its initial weights.

    Args:
        what: What was trained.
        start: What the training started from, such as "member 2".
        criterion: The name of the metric by which epochs are selected.
    """
    return f"{what} returned its initial weights ({start}): no epoch had a lower {criterion} on validation data"
