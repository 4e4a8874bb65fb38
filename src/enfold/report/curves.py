"""Learning curves from stored histories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from enfold.report.blocks import Block, Figure, Item, Table
from enfold.report.content import Content, Training
from enfold.report.figure import KINDS, legend_above
from enfold.report.metric_columns import metric_title
from enfold.report.svg import draw_svg

# A palette for all kinds of colour vision (M. Okabe and K. Ito, 2008); dashes differ too.
LINES = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2", "#56B4E9")
DASHES = ("-", "--", "-.", ":")


def curve_blocks(content: Content) -> list[Block]:
    """Return the curves of the members, and those of steps and controls."""
    started = [training for training in content.trainings if training.done]
    members = [training for training in started if training.stage.startswith("members/")]
    others = [training for training in started if not training.stage.startswith("members/")]
    blocks: list[Block] = []
    if members:
        blocks.append(_members(members))
    if others:
        blocks.append(_others(others))
    return blocks


def progress_blocks(content: Content) -> list[Block]:
    """Return the trainings in progress with the remaining time."""
    open_ = [training for training in content.trainings if training.seconds is None]
    rows = tuple((Item(training.stage), *_progress(training)) for training in open_)
    names = {_metric(training, key) for training in open_ for key in ("criterion", "score")}
    is_usual = names <= {"nll", "accuracy"}
    last = ("validation NLL (nats)", "validation accuracy (%)") if is_usual else ("validation loss", "validation score")
    header = ("training", "seed", "epoch", "time left", *last)
    return (
        [Table("Trainings in progress or stopped; continue a stopped run with --resume.", header, rows)] if rows else []
    )


def _progress(training: Training) -> list[Item]:
    last = training.history["epochs"][-1] if training.history and training.done else {}
    left = training.seconds_left
    planned = "" if training.epochs is None else f" of {training.epochs}"
    return [
        Item(str(training.seed)),
        Item(f"{training.done}{planned}"),
        Item("–" if left is None else duration(left)),
        Item(_mean(last.get("validation_loss"), 1, 4)),
        Item(_mean(last.get("validation_score"), *((100, 2) if _metric(training, "score") == "accuracy" else (1, 4)))),
    ]


def _metric(training: Training, key: str) -> str:
    """Return the name of the criterion or score of a training."""
    usual = {"criterion": "nll", "score": "accuracy"}[key]
    return str((training.history or {}).get(key, usual))


def _loss(trainings: Sequence[Training]) -> tuple[str, str]:
    """Return the name of the validation loss of some trainings, and its unit in parentheses."""
    names = {_metric(training, "criterion") for training in trainings}
    name = metric_title(names.pop()) if len(names) == 1 else "loss"
    return name, " (nats)" if name == "NLL" else ""


def duration(seconds: float) -> str:
    """Return a duration with its unit."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _mean(values: Sequence[float] | None, scale: float, digits: int) -> str:
    return f"{scale * sum(values) / len(values):.{digits}f}" if values else "–"


def _members(trainings: Sequence[Training]) -> Figure:
    seeds = len(trainings)
    number = len(trainings[0].history["epochs"][0]["train_loss"]) if trainings[0].history else 0
    loss, _ = _loss(trainings)
    return Figure(
        title="Training of the members",
        caption=(
            f"Thin lines: one member each ({number} members, {seeds} seed{'s' if seeds > 1 else ''}), training loss on "
            f"the left, validation {loss} on the right. Thick lines: the {loss} of their mean prediction. Epoch 0 is "
            "before training. If thin lines still fall at the end, members have not converged, and further training "
            "alone improves them; the gap between thin and thick lines is the gain of the ensemble."
        ),
        alt=f"Learning curves of {number} members over {trainings[0].done} epochs: training loss and validation {loss}",
        svg=draw_svg(lambda: draw_members(trainings), "learning curves"),
    )


def _others(trainings: Sequence[Training]) -> Figure:
    stages = list(dict.fromkeys(training.stage for training in trainings))
    loss, _ = _loss(trainings)
    return Figure(
        title="Training of steps and controls",
        caption=(
            f"Validation {loss} after each epoch, one line per seed (mean over members of efficient ensembles); epoch "
            "0 is the initialization. A distilled network below its control gains more from the ensemble than from "
            "more epochs."
        ),
        alt=f"Validation {loss} by epoch of {', '.join(stages)}",
        svg=draw_svg(lambda: draw_others(trainings, stages), "learning curves"),
    )


def _panels(columns: int, width: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing
    from matplotlib.ticker import MaxNLocator

    figure = Drawing(figsize=(width, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, panels


def draw_members(trainings: Sequence[Training]) -> Any:
    """Return the figure of training loss and validation NLL of every member and NLL of their mean prediction."""
    from matplotlib.lines import Line2D

    figure, (left, right) = _panels(2, 7.6)
    member, ensemble = KINDS["member"].colour, KINDS["ensemble"].colour
    for training in trainings:
        for number in range(len(_epochs(training)[0]["train_loss"])):
            _line(left, training, partial(_nth, "train_loss", number), color=member, lw=0.8)
            _line(right, training, partial(_nth, "validation_loss", number), color=member, lw=0.8)
        _line(right, training, lambda epoch: epoch["ensemble_loss"], color=ensemble, lw=2)
    left.set_ylabel("training loss")
    right.set_ylabel("validation {}{}".format(*_loss(trainings)))
    _set_scales(left, right)
    handles = [Line2D([], [], color=member, lw=1, label="member")]
    legend_above(left, handles)
    legend_above(right, [*handles, Line2D([], [], color=ensemble, lw=2, label="ensemble")], ncols=2)
    return figure


def draw_others(trainings: Sequence[Training], stages: Sequence[str]) -> Any:
    """Return the figure of the validation NLL of all other trainings, one style per stage."""
    from matplotlib.lines import Line2D

    figure, (axes,) = _panels(1, 7.6)
    looks: dict[str, dict[str, Any]] = {
        stage: {"color": LINES[number % len(LINES)], "ls": DASHES[number // len(LINES) % len(DASHES)]}
        for number, stage in enumerate(stages)
    }
    for stage in stages:
        if stage.startswith("controls/"):
            looks[stage]["color"] = KINDS["control"].colour
    for training in trainings:
        _line(axes, training, lambda epoch: _average(epoch["validation_loss"]), lw=1.2, **looks[training.stage])
    axes.set_ylabel("validation {}{}".format(*_loss(trainings)))
    _set_scales(axes)
    handles = [Line2D([], [], lw=1.6, label=stage.split("/", 1)[1], **look) for stage, look in looks.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
    return figure


def _set_scales(*panels: Any) -> None:
    """Start at epoch 0, with a log scale where a linear one would hide the last epochs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axes in panels:
        axes.set_xlim(left=0)
        values = [value for line in axes.lines for value in line.get_ydata()]
        if not values or min(values) <= 0 or max(values) < 3 * min(values):
            continue
        axes.set_yscale("log")
        axes.set_ylabel(axes.get_ylabel() + ", log scale")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _epochs(training: Training) -> Sequence[Any]:
    epochs: Sequence[Any] = training.history["epochs"] if training.history else ()
    return epochs


def _nth(name: str, index: int, epoch: Mapping[str, Any]) -> float | None:
    values: Sequence[float] = epoch[name]
    return values[index] if index < len(values) else None


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _line(axes: Any, training: Training, value: Callable[[Any], float | None], **look: Any) -> None:
    start = (training.history or {}).get("start")
    points = [(epoch["epoch"] + 1, value(epoch)) for epoch in (*([start] if start else ()), *_epochs(training))]
    known = [(number, each) for number, each in points if each is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="." if len(known) == 1 else "", **look)
