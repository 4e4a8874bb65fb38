"""The figure of quality against cost, and the style of all figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enfold.display import CONTROL, EFFICIENT, ENSEMBLE, MEMBER, NETWORK
from enfold.errors import MissingExtra
from enfold.io.files import atomic_path
from enfold.report.label_placement import Array, distance, leader, place_labels
from enfold.report.metric_columns import criterion_of, metric_title

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "svg.hashsalt": "enfold",
}


@dataclass(frozen=True)
class Kind:
    """The style of the models of one kind."""

    title: str
    colour: str
    marker: str
    size: float  # in points; markers of equal width differ in visual size


# Markers differ, too.
KINDS = {
    "member": Kind("mean member", MEMBER, "o", 8),
    "ensemble": Kind("ensemble", ENSEMBLE, "s", 7),
    "efficient": Kind("efficient ensemble", EFFICIENT, "^", 8),
    "network": Kind("distilled or merged", NETWORK, "D", 6.5),
    "control": Kind("control", CONTROL, "X", 8),
}
INK, FAINT = "#333333", "#777777"
LANE = 9.5  # points between two markers that are drawn side by side
LINE = 20.0  # height of a row below the scale, in points
ASIDE = "(overlapping points are drawn side by side)"
LOG_FROM = 8.0  # ratio of costs above which the axis is logarithmic


@dataclass(frozen=True)
class Point:
    """One row of a run with its cost."""

    name: str
    kind: str
    cost: float
    nll: float  # or the loss by which the models of another task are compared
    deviation: float
    metric: str = "nll"


def draw_quality_cost(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw NLL against the FLOPs of one prediction as SVG and PNG; models far off the scale are listed below it.

    Args:
        summary: The results of a run, as in `summary.json`.
        folder: Where the files are written.

    Returns:
        The paths of the files.
    """
    return write_figure(lambda: draw(read_points(summary)), folder, "quality-cost", "the quality-cost figure")


def write_figure(make: Callable[[], Any], folder: Path, name: str, purpose: str, alt: str = "") -> list[Path]:
    """Write the figure that `make` draws as SVG and PNG.

    Args:
        make: Returns a matplotlib figure.
        folder: Where the files are written.
        name: The name of the files without a suffix.
        purpose: What the figure is for, for the error if matplotlib is missing.
        alt: The alt text, stored as the description of both files.

    Returns:
        The paths of the files.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", purpose) from error

    written = []
    with style.context(["default", STYLE]):
        figure = make()
        description: dict[str, Any] = {"Description": alt} if alt else {}
        for ending, about in (("svg", {**description, "Date": None}), ("png", description)):
            path = folder / f"{name}.{ending}"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format=ending, dpi=160, metadata=about)
            written.append(path)
    return written


def read_points(summary: Mapping[str, Any]) -> list[Point]:
    """Return the rows of a run that have a cost."""
    points, criterion = [], criterion_of(summary["rows"])
    for name, row in summary["rows"].items():
        if row.get("cost"):
            loss = row["scores"][criterion]
            cost = row["cost"]["ratios"]["flops"]
            points.append(Point(name, kind_of(name, row), cost, loss["mean"], loss["std"] or 0.0, criterion))
    return points


def kind_of(name: str, row: Mapping[str, Any]) -> str:
    """Return the key of `KINDS` for a row of a run; a row with a diversity has several members."""
    if name == "mean member":
        return "member"
    if name == "ensemble" or name.startswith("ensemble of "):
        return "ensemble"
    if name.startswith("control"):
        return "control"
    return "efficient" if row.get("diversity") else "network"


def split_outliers(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the points on the scale, and those with a much larger NLL (less than half of all)."""
    known = sorted(point.nll for point in points if math.isfinite(point.nll))
    if not known:
        return [], list(points)
    usual = max([statistics.median(known), *(point.nll for point in points if point.kind == "member")])
    limit = usual + 3 * max(usual - known[0], 0.01 * abs(usual))
    near = [point for point in points if point.nll <= limit and math.isfinite(point.nll)]
    away = [point for point in points if point not in near]
    return near, sorted(away, key=lambda point: (math.isnan(point.nll), point.nll))


def draw(points: Sequence[Point]) -> Any:
    """Return the figure; its artists have `marker:<name>` or `label:<name>` as their gid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    near, away = split_outliers(points)
    plot, strip = max(3.4, 0.19 * len(near)), LINE * len(away) / 72
    figure = Figure(figsize=(7, plot + strip + 1.2), dpi=72, layout="constrained")  # a pixel is a point
    FigureCanvasAgg(figure)
    grid = {"height_ratios": [plot, strip], "hspace": 0.0} if away else {}
    panels = figure.subplots(2 if away else 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    _scales(panels, near, points)
    _words(panels, points)
    if away:
        panels[0].tick_params(axis="x", bottom=False)
        _strip(panels[1], away)
    figure.draw_without_rendering()
    if not np.array_equal(_pixels(panels[0], near), spread_points(panels[0], near)):
        panels[-1].set_xlabel(panels[-1].get_xlabel() + "\n" + ASIDE)
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed around artists that must not move any more
    _show_near(panels[0], near)
    return figure


def _scales(panels: Any, near: Sequence[Point], points: Sequence[Point]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes, costs = panels[0], [point.cost for point in points] or [1.0]
    low, high = min(costs), max(costs)
    if low > 0 and high / low > LOG_FROM:
        axes.set_xscale("log", base=2)
        margin = (high / low) ** 0.12
        axes.set_xlim(low / margin, high * margin)
    else:
        axes.set_xlim(0, (high or 1.0) * 1.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    best = min((point.nll - point.deviation for point in near), default=0.0)
    worst = max((point.nll + point.deviation for point in near), default=1.0)
    margin = 0.07 * ((worst - best) or abs(best) or 1.0)
    axes.set_ylim(worst + margin, best - margin)


def _words(panels: Any, points: Sequence[Point]) -> None:
    from matplotlib.lines import Line2D

    scale = ", log scale" if panels[0].get_xscale() == "log" else ""
    panels[-1].set_xlabel(f"FLOPs of one prediction, relative to a single network{scale}")
    metric = points[0].metric if points else "nll"
    unit = "nats; " if metric == "nll" else ""
    panels[0].set_ylabel(f"{metric_title(metric)} on test data ({unit}up is better)")
    panels[0].set_title("Quality and cost", loc="left", pad=24)
    kinds = [kind for name, kind in KINDS.items() if any(point.kind == name for point in points)]
    handles = [
        Line2D([], [], ls="", marker=kind.marker, color=kind.colour, ms=kind.size, label=kind.title) for kind in kinds
    ]
    legend_above(panels[0], handles, ncols=len(KINDS), columnspacing=1.0, fontsize=8.5)


def legend_above(axes: Any, handles: Sequence[Any], **changes: Any) -> None:
    """Add a legend in one line above a panel."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        frameon=False,
        borderpad=0.2,
        borderaxespad=0,
        handlelength=1,
        handletextpad=0.3,
        **changes,
    )


def _strip(axes: Any, away: Sequence[Point]) -> None:
    """Draw the rows off the scale in a separate panel, with an arrow and their values."""
    axes.set_facecolor("#f4f4f4")
    axes.set_ylim(len(away), 0)
    axes.set_yticks([len(away) / 2], ["off the\nscale"], color=FAINT, size=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for line, point in enumerate(away):
        kind = KINDS[point.kind]
        (marker,) = axes.plot(point.cost, line + 0.4, kind.marker, color=kind.colour, ms=kind.size)
        marker.set_gid(f"marker:{point.name}")
        axes.annotate(
            "",
            (point.cost, line + 1),
            (point.cost, line + 0.4),
            arrowprops={"arrowstyle": "->", "color": kind.colour, "lw": 1.2, "shrinkA": 3, "shrinkB": 0},
        )
        start, end = axes.get_xlim()
        to_left = axes.get_xscale() == "log" and math.log(point.cost / start) > 0.6 * math.log(end / start)
        to_left = to_left or (axes.get_xscale() == "linear" and point.cost > 0.6 * end)
        axes.annotate(
            f"{point.name}: {point.nll:.2f}{' nats' if point.metric == 'nll' else ''}",
            (point.cost, line + 0.4),
            (-8 if to_left else 8, 0),
            textcoords="offset points",
            ha="right" if to_left else "left",
            va="center",
            size=9,
            color=INK,
            gid=f"label:{point.name}",
        )


def _show_near(axes: Any, near: Sequence[Point]) -> None:
    for point in near:
        if _is_reference(point):
            axes.axhline(point.nll, color=KINDS[point.kind].colour, lw=1, ls=":", zorder=0.9)  # over the grid
    middles = spread_points(axes, near)
    shown = axes.transData.inverted().transform(middles) if near else middles
    for point, (cost, nll) in zip(near, shown, strict=True):
        kind = KINDS[point.kind]
        bars = axes.errorbar(
            cost,
            nll,
            yerr=point.deviation or None,
            fmt=kind.marker,
            ms=kind.size,
            mec="white",
            mew=0.6,
            color=kind.colour,
            elinewidth=0.8,
            capsize=2,
            capthick=0.8,
        )
        bars.lines[0].set_gid(f"marker:{point.name}")
    _label(axes, near, middles)


def _is_reference(point: Point) -> bool:
    """Return whether other rows are compared with this one, which then has a dotted line."""
    return point.name in ("mean member", "ensemble")


def _pixels(axes: Any, points: Sequence[Point]) -> Array:
    places = np.array([(point.cost, point.nll) for point in points], dtype=np.float64).reshape(-1, 2)
    return np.asarray(axes.transData.transform(places))


def _bars(axes: Any, points: Sequence[Point]) -> Array:
    """Return half the height of each error bar in pixels."""
    (_, low), (_, high) = axes.transData.transform([(1, 0), (1, 1)])
    return np.array([point.deviation for point in points], dtype=np.float64) * float(abs(high - low))


def spread_points(axes: Any, points: Sequence[Point]) -> Array:
    """Return the positions of points in pixels; overlapping points are moved sideways by multiples of `LANE`."""
    middles, bars = _pixels(axes, points), _bars(axes, points)
    moved = middles.copy()
    done: list[int] = []

    def cost(lane: int, index: int) -> float:
        x, y = middles[index, 0] + lane * LANE, middles[index, 1]
        beside = [each for each in done if abs(moved[each, 0] - x) < LANE - 0.5]
        gaps = [abs(moved[each, 1] - y) for each in beside]
        overlap = (max(0.0, bars[index] + bars[each] - gap) for each, gap in zip(beside, gaps, strict=True))
        return float(1000 * sum(gap < LANE for gap in gaps) + 0.5 * sum(overlap) + LANE * abs(lane))

    for index in sorted(
        range(len(points)), key=lambda each: (not _is_reference(points[each]), -middles[each, 1], each)
    ):
        lane = min((0, 1, -1, 2, -2, 3, -3, 4, -4), key=lambda lane: cost(lane, index))
        moved[index, 0] += lane * LANE
        done.append(index)
    return moved


def _label(axes: Any, near: Sequence[Point], middles: Array) -> None:
    """Write each name at a free place near its marker, with a line to it if it is far away."""
    from matplotlib.patheffects import withStroke

    texts = [axes.text(0, 0, point.name, size=9, color=INK, transform=None, va="bottom") for point in near]
    sizes = np.array([text.get_window_extent().size for text in texts], dtype=np.float64).reshape(-1, 2)
    half = np.array([KINDS[point.kind].size / 2 + 0.5 for point in near])[:, None]
    markers = np.concatenate([middles - half, middles + half], axis=1)
    boxes = place_labels(markers, sizes, np.asarray(axes.bbox.extents, dtype=np.float64), _lines(axes, near, middles))
    back = axes.transData.inverted()
    for point, text, marker, box in zip(near, texts, markers, boxes, strict=True):
        text.remove()
        left, bottom = back.transform(box[:2])
        name = axes.text(left, bottom, point.name, size=9, color=INK, va="bottom", gid=f"label:{point.name}", zorder=4)
        name.set_path_effects([withStroke(linewidth=2, foreground="white")])  # readable across a bar
        if distance(marker, box) > LANE:
            axes.plot(*back.transform(leader(marker, box)).T, color=FAINT, lw=0.6, zorder=1)


def _lines(axes: Any, near: Sequence[Point], middles: Array) -> Array:
    """Return the error bars and the dotted lines as thin boxes."""
    bars = np.stack([np.full(len(near), 2.0), _bars(axes, near)], axis=1)
    upright = np.concatenate([middles - bars, middles + bars], axis=1)
    left, _, right, _ = axes.bbox.extents
    level = [
        (left, y - 0.5, right, y + 0.5) for y, point in zip(middles[:, 1], near, strict=True) if _is_reference(point)
    ]
    return np.concatenate([upright, np.array(level, dtype=np.float64).reshape(-1, 4)])


def draw_arrow(
    axes: Any, height: float, start: float, end: float, colour: str, label: str, hollow: bool = False
) -> None:
    """Draw a line from a short bar (the value before) to a circle (the value after).

    Args:
        axes: The axes of Matplotlib.
        height: The vertical position.
        start: The value before.
        end: The value after.
        colour: The colour.
        label: The label of the legend.
        hollow: Whether the circle is not filled.
    """
    axes.plot([start, end], [height, height], color=colour, lw=1.6, zorder=2)
    axes.plot([start], [height], "|", color=colour, ms=11, mew=2, zorder=3)
    axes.plot(
        [end],
        [height],
        "o",
        ms=7.5,
        mew=1.6,
        mec=colour,
        mfc="white" if hollow else colour,
        zorder=4,
        gid=f"end:{label}",
    )
