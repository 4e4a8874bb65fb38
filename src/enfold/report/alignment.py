"""Figures of a study of alignment: rows, lines, soft permutations, temperatures, averages and planted pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enfold.files import write_json
from enfold.report.figure import FAINT, INK, legend_above, write_figure
from enfold.report.mechanism import arrow

Part = Any  # a part of a study as JSON holds it
Array = npt.NDArray[np.float64]

# Colours that people with any colour vision tell apart (M. Okabe and K. Ito, 2008); dashes and shapes do without.
LOOKS: dict[str, dict[str, Any]] = {
    "naive": {"color": "#777777", "ls": "--", "marker": "X"},
    "weight matching": {"color": "#56B4E9", "ls": "-.", "marker": "s"},
    "permAVG": {"color": "#D55E00", "ls": "-", "marker": "o"},
    "permAVG, matched": {"color": "#009E73", "ls": "-", "marker": "D"},
    "ensemble": {"color": "#0072B2", "ls": ":", "marker": "P"},
    "mean member": {"color": "#333333", "ls": ":", "marker": "|"},
}
GROUPS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
SHAPES = ("o", "s", "^", "D", "v", "P")
LOG_FROM = 10.0  # a spread of losses beyond which a linear axis hides the low ones
WHOLE = 64  # blocks along one side of a whole matrix: of single entries of 512 x 512 nothing is seen
ZOOM = 24  # units of a matrix shown one by one
WORDS = {  # of a figure, in the order of a page: its title, and how to read it
    "rows": (
        "Rows of weights before and after alignment",
        "Layer by layer, a bar before and a dot after. Where alignment pairs the right units, the correlation of "
        "paired rows rises from about 0 and their distance falls; read the distance beside the length of a row, since "
        "soft permutations mix rows, which makes them shorter and so nearer to each other.",
    ),
    "line": (
        "On the straight line between two members",
        "Accuracy and loss of weights mixed in every proportion. A dip in accuracy, or a hill of loss, is a barrier: "
        "the two members lie in different valleys. Alignment that works leaves none.",
    ),
    "averages": (
        "Averages of members' weights",
        "Accuracy of one network with the mean of the first members' weights, as they are and aligned, beside their "
        "ensemble. Far left is the mean member: an average is worth its name where it does not fall below.",
    ),
    "softness": (
        "How soft the permutations are",
        "Entropy of a row of the learned matrix over the largest possible one, by layer: 0 is a permutation, 1 mixes "
        "all units alike and aligns nothing.",
    ),
    "matrices": (
        "The soft permutations",
        "Each whole matrix in blocks, its columns sorted, then its hardest and its softest rows unit by unit. One dark "
        "entry a row is a permutation; an even colour is a mixture of all units.",
    ),
    "sweep": (
        "Temperatures",
        "Accuracy, loss and softness of the average against the temperature it was learned at: low ones give hard "
        "permutations that learn slowly, high ones mix units until nothing is left.",
    ),
    "planted": (
        "A planted permutation",
        "One member beside a copy of itself with units in another order and noise on its weights: how many units are "
        "found again, against the noise. The dotted line is chance.",
    ),
    "different": (
        "Members that differ in function",
        "Two members that learned other classes, or other labels, and averages of their weights, on all classes and "
        "true labels. There is nothing to align here: an average that does well would have learned it anew.",
    ),
}


def alignment_figures(found: Mapping[str, Part], matrices: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every figure that the parts of a study allow, as SVG and PNG; `matrices` are (members - 1, d, d) by group."""
    drawings: dict[str, Callable[[], Any]] = {}
    for name, (part, draw) in DRAWINGS.items():
        if found.get(part):
            drawings[name] = partial(draw, found[part])
    for mode, lines in found.get("line", {}).items():
        drawings["line" if len(found["line"]) == 1 else f"line-{mode}"] = partial(draw_line, lines)
    if found.get("sweep"):
        drawings["sweep"] = partial(draw_sweep, found["sweep"], found.get("averages"))
    if found.get("matrices") and matrices:
        arrays = {name: np.asarray(each[0], dtype=np.float64) for name, each in matrices.items()}
        drawings["matrices"] = partial(draw_matrices, arrays)
    written: list[Path] = []
    listed = []
    order = list(WORDS)
    for name, make in sorted(drawings.items(), key=lambda named: order.index(named[0].split("-")[0])):
        title, caption = WORDS[name.split("-")[0]]
        written += write_figure(make, folder, name, "the figures of alignment", alt=f"{title}: {caption}")
        listed.append({"file": f"{name}.svg", "title": title, "caption": caption, "alt": f"{title}: {caption}"})
    write_json(folder / "figures.json", {"figures": listed})
    return [*written, folder / "figures.json"]


def _figure(width: float, height: float, columns: int = 1, **changes: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False, **changes)[0]


def draw_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Distance, deviation, correlation and length of rows, before and after, layer by layer."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure, panels = _figure(10, 1.7 + 0.42 * len(rows), 4, sharey=True)
    titles = {
        "correlation": "correlation of paired rows",
        "distance": "distance of paired rows",
        "length": "length of a row",
        "deviation": "deviation of a weight",
    }
    colour = LOOKS["permAVG"]["color"]
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for height, row in enumerate(rows):
            arrow(axes, height, row[what]["before"], row[what]["after"], colour, f"{what} {row['layer']}")
        values = [value for row in rows for value in row[what].values()]
        axes.set_xlabel(title)
        if min(values) > 0 and max(values) / min(values) > LOG_FROM and what != "correlation":
            axes.set_xscale("log")
        else:
            axes.set_xlim(*_limits(values))
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    names = [row["layer"] if row["hidden"] else f"{row['layer']} (output)" for row in rows]
    panels[0].set_yticks(range(len(rows)), names, color=INK)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    marks: list[tuple[str, str, float, float]] = [("before", "|", 11, 2), ("after", "o", 7.5, 1.6)]
    handles = [Line2D([], [], ls="", marker=m, color=colour, ms=s, mew=w, label=label) for label, m, s, w in marks]
    panels[0].set_title("Members' weights before and after alignment", loc="left", size=11, pad=24)
    legend_above(panels[0], handles, ncols=2, columnspacing=1.2, fontsize=9)
    return figure


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """A range with 0 in it and some room."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    room = 0.08 * ((high - low) or 1.0)
    return low - room, high + room


def draw_line(lines: Mapping[str, Mapping[str, Any]]) -> Any:
    """Accuracy and loss between two members as they are and aligned."""
    figure, (left, right) = _figure(8, 3.5, 2)
    for name, line in lines.items():
        look = {**LOOKS[name], "ms": 3.5, "lw": 1.6, "label": name}
        if name == "weight matching":
            look |= {"lw": 5, "ls": "-", "marker": ""}  # seen below a line that is the same
        left.plot(line["alphas"], [100 * value for value in line["accuracy"]], **look)
        right.plot(line["alphas"], line["loss"], **look)
    losses = [value for line in lines.values() for value in line["loss"]]
    _log_if_wide(right, losses)
    left.set_ylabel("accuracy on test data (%)")
    right.set_ylabel("cross-entropy on test data (nats)")
    for axes in (left, right):
        axes.set_xlabel("member 2  ←  part of member 1, α  →  member 1")
        axes.set_xlim(-0.03, 1.03)
    left.set_title("On the straight line between two members", loc="left", size=11, pad=24)
    legend_above(left, left.get_legend_handles_labels()[0], ncols=3, columnspacing=1.2, fontsize=9)
    return figure


def _log_if_wide(axes: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_softness(groups: Sequence[Mapping[str, Any]]) -> Any:
    """Softness of each group's matrices, a point for each aligned member."""
    figure, (axes,) = _figure(6, 1.4 + 0.4 * len(groups))
    for height, group in enumerate(groups):
        values = group["softness"]
        axes.plot([0, sum(values) / len(values)], [height, height], color="#cccccc", lw=1.2, zorder=1)
        axes.plot(values, [height] * len(values), "o", color=LOOKS["permAVG"]["color"], ms=7, mec="white", mew=0.6)
        mean = sum(values) / len(values)
        axes.annotate(
            f"{mean:.3f}", (max(values), height), (8, 0), textcoords="offset points", va="center", size=9, color=INK
        )
    axes.set_yticks(range(len(groups)), [f"{group['group']} ({group['units']})" for group in groups], color=INK)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.08)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("softness: entropy of a row over its largest possible\n0: a permutation, 1: all units mixed alike")
    axes.set_title("How soft the permutations are", loc="left", size=11)
    return figure


def draw_matrices(matrices: Mapping[str, Array]) -> Any:
    """Each group's matrix of the second member: whole, and its hardest and softest rows with their own columns."""
    from matplotlib.colors import PowerNorm

    figure, _ = _figure(1, 1)
    figure.clear()
    figure.set_size_inches(9, 0.7 + 2.75 * len(matrices))
    panels = figure.subplots(len(matrices), 3, squeeze=False)
    norm = PowerNorm(0.5, 0, 1)
    for line, (name, matrix) in zip(panels, matrices.items(), strict=True):
        hard, soft = _ends(matrix)
        shown = {f"{name}: {len(matrix)} units": _blocks(matrix), "hardest rows": hard, "softest rows": soft}
        for axes, (title, image) in zip(line, shown.items(), strict=True):
            drawn = axes.imshow(image, cmap="magma_r", norm=norm, interpolation="nearest")
            axes.set_title(title, loc="left", size=10)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(visible=False)
            for side in ("top", "right"):
                axes.spines[side].set_visible(True)
        block = _block(len(matrix))
        line[0].set_xlabel("units of member 2" + (f"; largest of {block} × {block} each" if block > 1 else ""), size=9)
        line[0].set_ylabel("units of member 1", size=9)
        for axes, image in zip(line[1:], (hard, soft), strict=True):
            axes.set_xlabel(f"{len(image)} × {len(image)} entries, columns sorted", size=9)
    bar = figure.colorbar(drawn, ax=panels, shrink=min(1.0, 0.9 / len(matrices) + 0.2), pad=0.01)
    bar.set_ticks([0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1])
    bar.ax.set_yticklabels(["0", "0.01", "0.05", "0.1", "0.25", "0.5", "0.75", "1"])
    bar.set_label("entry of the soft permutation")
    return figure


def _block(units: int) -> int:
    """How many entries along a side are shown as one."""
    return -(-units // WHOLE)


def _blocks(matrix: Array) -> Array:
    """The largest entry of each block, so that single ones are seen."""
    side = _block(len(matrix))
    count = -(-len(matrix) // side)
    padded = np.zeros((count * side, count * side))
    padded[: len(matrix), : len(matrix)] = matrix
    return np.asarray(padded.reshape(count, side, count, side).max(axis=(1, 3)))


def _ends(matrix: Array) -> tuple[Array, Array]:
    """The rows with the largest and with the smallest highest entries; columns are those of these entries, in order."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(matrix, maximize=True)
    order = np.argsort(-matrix[rows, columns], kind="stable")
    chosen = (order[:ZOOM], order[-ZOOM:])
    hard, soft = (matrix[np.ix_(rows[each], columns[each])] for each in chosen)
    return hard, soft


def draw_sweep(points: Sequence[Mapping[str, Any]], averages: Mapping[str, Any] | None = None) -> Any:
    """Accuracy, NLL and softness by temperature; those that failed are named."""
    figure, (left, middle, right) = _figure(10, 3.4, 3)
    good = [point for point in points if point["failed"] is None]
    temperatures = [point["temperature"] for point in good]
    look = {**LOOKS["permAVG"], "ms": 6, "lw": 1.6}
    left.plot(temperatures, [100 * point["accuracy"] for point in good], **look, label="permAVG")
    middle.plot(temperatures, [point["nll"] for point in good], **look)
    if averages:
        _references(left, middle, averages)
    _log_if_wide(middle, [point["nll"] for point in good] or [1.0])
    for index, group in enumerate(good[0]["softness"] if good else ()):
        style = {"color": GROUPS[index % len(GROUPS)], "marker": SHAPES[index % len(SHAPES)], "ms": 5.5, "lw": 1.4}
        right.plot(temperatures, [point["softness"][group] for point in good], **style, label=group)
    right.set_ylim(-0.03, 1.03)
    labels = ("accuracy on test data (%)", "NLL on test data (nats)", "softness")
    for axes, label in zip((left, middle, right), labels, strict=True):
        axes.set_ylabel(label)
        axes.set_xlabel("temperature τ (log scale)")
        axes.set_xscale("log")
        axes.set_xticks([point["temperature"] for point in points], [f"{point['temperature']:g}" for point in points])
        axes.minorticks_off()
        for point in (each for each in points if each["failed"] is not None):
            axes.axvline(point["temperature"], color=FAINT, lw=1, ls=":")
            place = (point["temperature"], 0.5)
            axes.text(*place, "singular", transform=axes.get_xaxis_transform(), rotation=90, size=8, color=FAINT)
    left.set_title("permAVG at several temperatures", loc="left", size=11, pad=24)
    legend_above(left, left.get_legend_handles_labels()[0], ncols=3, columnspacing=1.0, fontsize=9)
    legend_above(right, right.get_legend_handles_labels()[0], ncols=3, columnspacing=1.0, fontsize=8)
    return figure


def _references(left: Any, middle: Any, averages: Mapping[str, Any]) -> None:
    rows = {"mean member": averages["naive"]["1"], "ensemble": next(iter(averages["ensemble"].values()))}
    for name, scores in rows.items():
        look = {"color": LOOKS[name]["color"], "ls": (0, (1, 2)) if name == "ensemble" else (0, (4, 2)), "lw": 1.2}
        left.axhline(100 * scores["accuracy"], **look, label=name)
        middle.axhline(scores["nll"], **look)


def draw_averages(averages: Mapping[str, Mapping[str, Any]]) -> Any:
    """Accuracy of averaged weights by the number of members."""
    figure, (axes,) = _figure(5.5, 3.5)
    alone = averages["naive"]["1"]["accuracy"]
    for name, rows in averages.items():
        counts = [int(count) for count in rows]
        values = [100 * row["accuracy"] for row in rows.values()]
        if name == "weight matching":
            counts, values = [1, *counts], [100 * alone, *values]
        single = len(rows) == 1
        look = {**LOOKS[name], "ms": 6.5, "lw": 1.6, "ls": "" if single else LOOKS[name]["ls"]}
        aside = {"permAVG": -0.15, "ensemble": 0.15}.get(name, 0.0) if single else 0.0  # they may be equally good
        axes.plot([count + aside for count in counts], values, **look, label=name)
    axes.set_xticks(range(1, 1 + max(int(count) for count in averages["naive"])))
    axes.set_xlabel("members averaged (1: mean member)")
    axes.set_ylabel("accuracy on test data (%)")
    axes.set_title("Averages of members' weights", loc="left", size=11, pad=24)
    legend_above(axes, axes.get_legend_handles_labels()[0], ncols=4, columnspacing=1.0, fontsize=9)
    return figure


def draw_planted(points: Sequence[Mapping[str, Any]]) -> Any:
    """Share of a planted permutation that is found, by noise."""
    figure, (axes,) = _figure(6.2, 3.4)
    places = range(len(points))
    for name in points[0]["recovered"]:
        known = [(place, point["recovered"][name]) for place, point in zip(places, points, strict=True)]
        known = [(place, 100 * value) for place, value in known if value is not None]
        axes.plot(
            *zip(*known, strict=True), **LOOKS[name], ms=6.5, lw=1.6, label=name, clip_on=False
        ) if known else None
    axes.axhline(100 * points[0]["chance"], color=FAINT, lw=1, ls=":")
    axes.text(places[0] + 0.5, 100 * points[0]["chance"] + 2, "chance", ha="center", size=8, color=FAINT)
    axes.set_xticks(places, [f"{point['noise']:g}" for point in points])
    axes.set_ylim(-3, 105)
    axes.set_xlabel("noise, in deviations of the weights")
    axes.set_ylabel("units found (%)")
    axes.set_title("A planted permutation", loc="left", size=11, pad=24)
    legend_above(axes, axes.get_legend_handles_labels()[0], ncols=3, columnspacing=1.0, fontsize=9)
    return figure


def draw_different(pairs: Sequence[Mapping[str, Any]]) -> Any:
    """Accuracy of two members that were taught different things, and of their averages."""
    from matplotlib.lines import Line2D

    figure, (axes,) = _figure(6.5, 1.7 + 0.55 * len(pairs))
    keys = {"naive": "naive", "matched": "weight matching", "learned": "permAVG"}
    for height, pair in enumerate(pairs):
        axes.plot([100 * value for value in pair["members"]], [height] * 2, "|", color=INK, ms=14, mew=2)
        for key, name in keys.items():
            look = {"marker": LOOKS[name]["marker"], "color": LOOKS[name]["color"], "ms": 8, "mec": "white", "mew": 0.6}
            axes.plot([100 * pair[key]["accuracy"]], [height], **look)
    handles = [Line2D([], [], ls="", marker="|", color=INK, ms=11, mew=2, label="each member")]
    handles += [
        Line2D([], [], ls="", marker=LOOKS[name]["marker"], color=LOOKS[name]["color"], ms=7, label=name)
        for name in keys.values()
    ]
    axes.set_yticks(range(len(pairs)), [f"different {pair['difference']}" for pair in pairs], color=INK)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("accuracy on test data, all classes, true labels (%)")
    axes.set_title("Members that were taught different things", loc="left", size=11, pad=24)
    legend_above(axes, handles, ncols=4, columnspacing=1.2, fontsize=9)
    return figure


DRAWINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # figure -> the part it needs alone
    "rows": ("rows", draw_rows),
    "softness": ("matrices", draw_softness),
    "averages": ("averages", draw_averages),
    "planted": ("planted", draw_planted),
    "different": ("different", draw_different),
}
