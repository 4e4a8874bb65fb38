"""Figures from stored results: quality against cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enfold.errors import MissingExtra
from enfold.io.files import atomic_path
from enfold.report.labels import Array, distance, leader, place

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
    """How models of one kind are drawn."""

    title: str
    colour: str
    marker: str
    size: float  # in points; shapes of one width do not look equally large


# Colours that people with any colour vision tell apart (M. Okabe and K. Ito, 2008); shapes do without any colour.
KINDS = {
    "member": Kind("single network", "#56B4E9", "o", 8),
    "ensemble": Kind("ensemble", "#0072B2", "s", 7),
    "share": Kind("share", "#009E73", "^", 8),
    "fold": Kind("fold", "#D55E00", "D", 6.5),
    "control": Kind("control", "#777777", "X", 8),
}
INK, FAINT = "#333333", "#777777"
LANE = 9.5  # points of type between two markers set side by side
LINE = 20.0  # height of a row off the scale
ASIDE = "(points that would cover one another stand side by side)"
LOG_FROM = 8.0  # a spread of costs beyond which a linear axis squeezes the cheap ones into a corner


@dataclass(frozen=True)
class Point:
    """One row of a run that has a cost."""

    name: str
    kind: str
    cost: float
    nll: float
    deviation: float


def quality_cost(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """NLL against the operations of one prediction, as SVG and PNG; models far off the scale are named below it."""
    return write_figure(lambda: draw(points_of(summary)), folder, "quality-cost", "the quality-cost figure")


def write_figure(make: Callable[[], Any], folder: Path, name: str, purpose: str, alt: str = "") -> list[Path]:
    """What `make` draws, in the style of all figures, as SVG and PNG of that name; `purpose` is for an error.

    `alt` says what is to be seen for those who do not see it; both files carry it as their description.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", purpose) from error

    written = []
    with style.context(["default", STYLE]):
        figure = make()
        told: dict[str, Any] = {"Description": alt} if alt else {}
        for ending, about in (("svg", {**told, "Date": None}), ("png", told)):
            path = folder / f"{name}.{ending}"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format=ending, dpi=160, metadata=about)
            written.append(path)
    return written


def points_of(summary: Mapping[str, Any]) -> list[Point]:
    """The rows with a cost, each of the kind that the run's recipe gives it."""
    shares = {each["label"] for each in summary.get("recipe", {}).get("shares", ())}
    points = []
    for name, row in summary["rows"].items():
        if row.get("cost"):
            nll = row["scores"]["nll"]
            cost = row["cost"]["ratios"]["flops"]
            points.append(Point(name, kind_of(name, shares), cost, nll["mean"], nll["std"] or 0.0))
    return points


def kind_of(name: str, shares: set[str]) -> str:
    """The kind that a row of a run is of."""
    if name in shares:
        return "share"
    if name == "mean member":
        return "member"
    if name.startswith("ensemble"):
        return "ensemble"
    return "control" if name.startswith("control") else "fold"


def near_and_away(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points that share a scale, and those so much worse that they would squeeze it (never half of all)."""
    known = sorted(point.nll for point in points if math.isfinite(point.nll))
    if not known:
        return [], list(points)
    usual = max([statistics.median(known), *(point.nll for point in points if point.kind == "member")])
    limit = usual + 3 * max(usual - known[0], 0.01 * abs(usual))
    near = [point for point in points if point.nll <= limit and math.isfinite(point.nll)]
    away = [point for point in points if point not in near]
    return near, sorted(away, key=lambda point: (math.isnan(point.nll), point.nll))


def draw(points: Sequence[Point]) -> Any:
    """The figure, not yet written; its artists carry `marker:<name>` or `label:<name>` as their gid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    near, away = near_and_away(points)
    plot, strip = max(3.4, 0.19 * len(near)), LINE * len(away) / 72
    figure = Figure(figsize=(7, plot + strip + 1.2), dpi=72, layout="constrained")  # a pixel is a point of type
    FigureCanvasAgg(figure)
    grid = {"height_ratios": [plot, strip], "hspace": 0.0} if away else {}
    panels = figure.subplots(2 if away else 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    _scales(panels, near, points)
    _words(panels, points)
    if away:
        panels[0].tick_params(axis="x", bottom=False)
        _strip(panels[1], away)
    figure.draw_without_rendering()
    if not np.array_equal(_pixels(panels[0], near), side_by_side(panels[0], near)):
        panels[-1].set_xlabel(panels[-1].get_xlabel() + "\n" + ASIDE)
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on nothing may move, since labels are placed by what is where
    _show_near(panels[0], near)
    return figure


def _scales(panels: Any, near: Sequence[Point], points: Sequence[Point]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes, costs = panels[0], [point.cost for point in points] or [1.0]
    low, high = min(costs), max(costs)
    if low > 0 and high / low > LOG_FROM:
        axes.set_xscale("log", base=2)
        room = (high / low) ** 0.12
        axes.set_xlim(low / room, high * room)
    else:
        axes.set_xlim(0, (high or 1.0) * 1.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    best = min((point.nll - point.deviation for point in near), default=0.0)
    worst = max((point.nll + point.deviation for point in near), default=1.0)
    room = 0.07 * ((worst - best) or abs(best) or 1.0)
    axes.set_ylim(worst + room, best - room)


def _words(panels: Any, points: Sequence[Point]) -> None:
    from matplotlib.lines import Line2D

    scale = ", log scale" if panels[0].get_xscale() == "log" else ""
    panels[-1].set_xlabel(f"cost of one prediction (operations, ratio to one network{scale})")
    panels[0].set_ylabel("NLL on test data (nats; up is better)")
    panels[0].set_title("The quality of an ensemble at the price of one network", loc="left", pad=24)
    kinds = [kind for name, kind in KINDS.items() if any(point.kind == name for point in points)]
    handles = [
        Line2D([], [], ls="", marker=kind.marker, color=kind.colour, ms=kind.size, label=kind.title) for kind in kinds
    ]
    legend_above(panels[0], handles, ncols=len(KINDS), columnspacing=1.4)


def legend_above(axes: Any, handles: Sequence[Any], **changes: Any) -> None:
    """A legend in one line above a panel."""
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
    """Rows off the scale in a panel of their own, a line each, with an arrow and their value."""
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
            f"{point.name}: {point.nll:.2f} nats",
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
        if _leads(point):
            axes.axhline(point.nll, color=KINDS[point.kind].colour, lw=1, ls=":", zorder=0.9)  # over the grid
    middles = side_by_side(axes, near)
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


def _leads(point: Point) -> bool:
    """Whether all others are compared with it, so that it has a dotted line."""
    return point.name in ("mean member", "ensemble")


def _pixels(axes: Any, points: Sequence[Point]) -> Array:
    places = np.array([(point.cost, point.nll) for point in points], dtype=np.float64).reshape(-1, 2)
    return np.asarray(axes.transData.transform(places))


def _bars(axes: Any, points: Sequence[Point]) -> Array:
    """Half the height of each error bar in pixels."""
    (_, low), (_, high) = axes.transData.transform([(1, 0), (1, 1)])
    return np.array([point.deviation for point in points], dtype=np.float64) * float(abs(high - low))


def side_by_side(axes: Any, points: Sequence[Point]) -> Array:
    """Where points are drawn, in pixels: those that would cover one another are moved aside by whole lanes."""
    middles, bars = _pixels(axes, points), _bars(axes, points)
    moved = middles.copy()
    done: list[int] = []

    def cost(lane: int, index: int) -> float:
        x, y = middles[index, 0] + lane * LANE, middles[index, 1]
        beside = [each for each in done if abs(moved[each, 0] - x) < LANE - 0.5]
        apart = [abs(moved[each, 1] - y) for each in beside]
        shared = (max(0.0, bars[index] + bars[each] - gap) for each, gap in zip(beside, apart, strict=True))
        return float(1000 * sum(gap < LANE for gap in apart) + 0.5 * sum(shared) + LANE * abs(lane))

    for index in sorted(range(len(points)), key=lambda each: (not _leads(points[each]), -middles[each, 1], each)):
        lane = min((0, 1, -1, 2, -2, 3, -3, 4, -4), key=lambda lane: cost(lane, index))
        moved[index, 0] += lane * LANE
        done.append(index)
    return moved


def _label(axes: Any, near: Sequence[Point], middles: Array) -> None:
    """Every name in a free place beside its marker, with a line to it where that is not at once clear."""
    from matplotlib.patheffects import withStroke

    texts = [axes.text(0, 0, point.name, size=9, color=INK, transform=None, va="bottom") for point in near]
    sizes = np.array([text.get_window_extent().size for text in texts], dtype=np.float64).reshape(-1, 2)
    half = np.array([KINDS[point.kind].size / 2 + 0.5 for point in near])[:, None]
    markers = np.concatenate([middles - half, middles + half], axis=1)
    boxes = place(markers, sizes, np.asarray(axes.bbox.extents, dtype=np.float64), _lines(axes, near, middles))
    back = axes.transData.inverted()
    for point, text, marker, box in zip(near, texts, markers, boxes, strict=True):
        text.remove()
        left, bottom = back.transform(box[:2])
        name = axes.text(left, bottom, point.name, size=9, color=INK, va="bottom", gid=f"label:{point.name}", zorder=4)
        name.set_path_effects([withStroke(linewidth=2, foreground="white")])  # readable where it must cross a bar
        if distance(marker, box) > LANE:
            axes.plot(*back.transform(leader(marker, box)).T, color=FAINT, lw=0.6, zorder=1)


def _lines(axes: Any, near: Sequence[Point], middles: Array) -> Array:
    """The error bars and the two dotted lines, as thin boxes."""
    bars = np.stack([np.full(len(near), 2.0), _bars(axes, near)], axis=1)
    upright = np.concatenate([middles - bars, middles + bars], axis=1)
    left, _, right, _ = axes.bbox.extents
    level = [(left, y - 0.5, right, y + 0.5) for y, point in zip(middles[:, 1], near, strict=True) if _leads(point)]
    return np.concatenate([upright, np.array(level, dtype=np.float64).reshape(-1, 4)])


def draw_arrow(
    axes: Any, height: float, start: float, end: float, colour: str, label: str, hollow: bool = False
) -> None:
    """Draw a line from a short bar (the value before) to a circle (the value after)."""
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
