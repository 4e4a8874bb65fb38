"""Figures of an alignment analysis: rows, lines, soft permutations, temperatures, averages and planted pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from enfold.io.files import write_json
from enfold.report.alignment_groups import (
    Kind,
    describe_omitted,
    kinds_of,
    layer_name,
    select_evenly,
    select_kinds,
    short,
)
from enfold.report.alignment_matrices import draw_matrices
from enfold.report.figure import FAINT, INK, draw_arrow, legend_above, write_figure

Part = Any  # a part of a study as JSON holds it

# Colours that are distinct for all types of colour vision (M. Okabe and K. Ito, 2008); dashes and shapes add to them.
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
LOG_FROM = 10.0  # ratio of losses above which a linear axis hides the low ones
LETTER = 0.085  # inches per letter of a name
LINES = 60  # at most in one figure
MODES = {  # batch-norm mode -> addition to the title, addition to the caption
    "stored": ("batch-norm statistics interpolated", "Statistics are averaged like weights, which is wrong."),
    "repair": (
        "hidden units repaired",
        "Hidden units of each interpolated network have the members' means and standard deviations, by REPAIR.",
    ),
    "train": ("batch-norm statistics of each batch", "Batch-norm statistics are those of each batch of test data."),
    "reset": (
        "batch-norm statistics measured again",
        "Batch-norm statistics are measured again on training data for each interpolated network.",
    ),
}
WORDS = {  # figure, in the order of a page -> title, caption
    "rows": (
        "Rows of weights before and after alignment",
        "For each layer, a bar before and a dot after alignment. A correct alignment raises the correlation of paired "
        "rows from about 0 and reduces their distance. Compare the distance with the norm of the rows: soft "
        "permutations average rows, which makes them shorter and so closer to each other.",
    ),
    "line": (
        "On the straight line between two members",
        "Accuracy and loss of interpolated weights. A minimum of accuracy or a maximum of the loss between the ends is "
        "a barrier: the two members are in different modes. After a good alignment there is no barrier.",
    ),
    "averages": (
        "Averages of members' weights",
        "Accuracy of one network with the mean of the first members' weights, unaligned and aligned, beside their "
        "ensemble. The leftmost point is the mean member: a useful average is not below it.",
    ),
    "softness": (
        "Softness of the permutations",
        "Mean entropy of the rows of the learned matrix relative to its maximum, by layer, with the number of units: 0 "
        "is a permutation, 1 is a uniform mixture. Groups of one layer, such as the units of each of its "
        "heads, are dots on one line, and the number is their mean.",
    ),
    "matrices": (
        "The soft permutations",
        "For member 2, each complete matrix with units in the members' order (for a wide layer, the "
        "largest entry of each block), then its hardest and softest rows, with the columns of their largest entries "
        "in the same order. In a permutation each row has one dark entry, on the diagonal where columns are sorted; "
        "a uniform colour is a mixture of all units.",
    ),
    "sweep": (
        "Temperatures",
        "Accuracy, loss and softness of the average by the temperature of the training, beside the mean and the "
        "ensemble of the averaged members. Low temperatures give hard permutations that learn slowly; high "
        "temperatures average all units.",
    ),
    "planted": (
        "A planted permutation",
        "One member and a copy of it with permuted units and noise on its weights: the fraction of "
        "units that are matched correctly, by noise. The dotted line is chance.",
    ),
    "different": (
        "Members that differ in function",
        "Two members that were trained on different classes or labels, and averages of their weights, on all classes "
        "and true labels. No alignment exists here: an accurate average is the result of training.",
    ),
}


def draw_alignment(found: Mapping[str, Part], matrices: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all figures of the available sections as SVG and PNG; `matrices` are (members - 1, d, d) by group."""
    drawings: dict[str, Callable[[], Any]] = {}
    for name, (part, draw) in DRAWINGS.items():
        if found.get(part):
            drawings[name] = partial(draw, found[part])
    for mode, lines in found.get("line", {}).items():
        plain = mode == "stored" and not found["line"].keys() & {"train", "reset"}  # no batch norm: nothing is stored
        drawings["line" if plain else f"line-{mode}"] = partial(draw_line, lines, None if plain else mode)
    if found.get("sweep"):
        drawings["sweep"] = partial(draw_sweep, found["sweep"], found.get("averages"))
    if found.get("matrices") and matrices:
        arrays = {name: np.asarray(each[0], dtype=np.float64) for name, each in matrices.items()}
        drawings["matrices"] = partial(draw_matrices, arrays)
    written: list[Path] = []
    listed = []
    order = list(WORDS)
    for name, make in sorted(drawings.items(), key=lambda named: order.index(named[0].split("-")[0])):
        title, caption = _words(name)
        written += write_figure(make, folder, name, "the figures of alignment", alt=f"{title}: {caption}")
        listed.append({"file": f"{name}.svg", "title": title, "caption": caption, "alt": f"{title}: {caption}"})
    write_json(folder / "figures.json", {"figures": listed})
    return [*written, folder / "figures.json"]


def _words(name: str) -> tuple[str, str]:
    """Return title and caption of a figure."""
    what, _, mode = name.partition("-")
    title, caption = WORDS[what]
    return (f"{title}, {MODES[mode][0]}", f"{caption} {MODES[mode][1]}") if mode else (title, caption)


def _figure(width: float, height: float, columns: int = 1, **changes: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False, **changes)[0]


def draw_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw distance, deviation, correlation and norm of rows before and after alignment, layer by layer."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    shown = select_evenly(rows, LINES)
    names = [short(layer_name(row["layer"])) + ("" if row["hidden"] else " (output)") for row in shown]
    figure, panels = _figure(8.5 + LETTER * max(map(len, names)), 1.7 + _height(len(shown)), 4, sharey=True)
    titles = {
        "correlation": "correlation of paired rows",
        "distance": "distance of paired rows",
        "length": "length of a row",
        "deviation": "deviation of a weight",
    }
    colour = LOOKS["permAVG"]["color"]
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for height, row in enumerate(shown):
            draw_arrow(axes, height, row[what]["before"], row[what]["after"], colour, f"{what} {row['layer']}")
        values = [value for row in shown for value in row[what].values()]
        axes.set_xlabel(title)
        if what == "correlation" or not _log_if_wide(axes, values, "x"):
            axes.set_xlim(*_limits(values))
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(shown)), names, color=INK)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    marks: list[tuple[str, str, float, float]] = [("before", "|", 11, 2), ("after", "o", 7.5, 1.6)]
    handles = [Line2D([], [], ls="", marker=m, color=colour, ms=s, mew=w, label=label) for label, m, s, w in marks]
    if len(shown) < len(rows):
        figure.supxlabel(f"omitted: {len(rows) - len(shown)} layers between these, all in rows.json", size=10)
    panels[0].set_title("Members' weights before and after alignment", loc="left", size=11, pad=24)
    legend_above(panels[0], handles, ncols=2, columnspacing=1.2, fontsize=9)
    return figure


def _height(lines: int) -> float:
    """Return the height in inches for a number of lines; more lines are closer together."""
    return lines * min(0.42, max(0.2, 12 / lines))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits of an axis that include 0 and a margin."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    margin = 0.08 * ((high - low) or 1.0)
    return low - margin, high + margin


def draw_line(lines: Mapping[str, Mapping[str, Any]], mode: str | None = None) -> Any:
    """Draw accuracy and loss between two members, unaligned and aligned; `mode` is that of batch norm."""
    figure, (left, right) = _figure(8, 3.5, 2)
    for name, line in lines.items():
        look = {**LOOKS[name], "ms": 3.5, "lw": 1.6, "label": name}
        if name == "weight matching":
            look |= {"lw": 5, "ls": "-", "marker": ""}  # remains visible below an equal line
        left.plot(line["alphas"], [100 * value for value in line["accuracy"]], **look)
        right.plot(line["alphas"], line["loss"], **look)
    losses = [value for line in lines.values() for value in line["loss"]]
    _log_if_wide(right, losses)
    left.set_ylabel("accuracy on test data (%)")
    right.set_ylabel("cross-entropy on test data (nats)")
    for axes in (left, right):
        axes.set_xlabel("member 2  ←  part of member 1, α  →  member 1", size=9)
        axes.set_xlim(-0.03, 1.03)
    how = f", {MODES[mode][0]}" if mode else ""
    left.set_title(f"On the straight line between two members{how}", loc="left", size=11, pad=24)
    legend_above(left, left.get_legend_handles_labels()[0], ncols=3, columnspacing=1.2, fontsize=9)
    return figure


def _log_if_wide(axes: Any, values: Sequence[float], which: str = "y") -> bool:
    """Use a logarithmic scale, with plain numbers, if a linear scale would hide the low values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) <= 0 or max(values) / min(values) <= LOG_FROM:
        return False
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(values) / min(values) < 100 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    return True


def draw_softness(groups: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the softness of each kind of units, with a point for each of its groups and aligned members."""
    values = {group["group"]: group["softness"] for group in groups}
    kinds = kinds_of({group["group"]: group["units"] for group in groups})
    shown = select_kinds(kinds, LINES)
    names = [str(kind) for kind in shown]
    figure, (axes,) = _figure(4.6 + LETTER * max(map(len, names)), 1.4 + _height(len(shown)))
    for height, kind in enumerate(shown):
        own = [value for name in kind.groups for value in values[name]]
        mean = sum(own) / len(own)
        axes.plot([0, mean], [height, height], color="#cccccc", lw=1.2, zorder=1)
        axes.plot(own, [height] * len(own), "o", color=LOOKS["permAVG"]["color"], ms=7, mec="white", mew=0.6)
        beside = {"textcoords": "offset points", "va": "center", "size": 9, "color": INK}
        axes.annotate(f"{mean:.3f}", (max(own), height), (8, 0), **beside)
    axes.set_yticks(range(len(shown)), names, color=INK)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.12)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    less = fill(describe_omitted(kinds, shown, "matrices.json"), 50)
    axes.set_xlabel("softness\n0: a permutation, 1: a uniform mixture" + (f"\n{less}" if less else ""))
    axes.set_title("Softness of the permutations", loc="left", size=11)
    return figure


def draw_sweep(points: Sequence[Mapping[str, Any]], averages: Mapping[str, Any] | None = None) -> Any:
    """Draw accuracy, NLL and softness by temperature; temperatures that failed are named."""
    good = [point for point in points if point["failed"] is None]
    kinds = kinds_of(dict.fromkeys(good[0]["softness"], 0) if good else {})
    shown = select_kinds(kinds, len(GROUPS))
    figure, (left, middle, right) = _figure(9.6 + LETTER * max((len(kind.name) for kind in shown), default=0), 3.4, 3)
    temperatures = [point["temperature"] for point in good]
    look = {**LOOKS["permAVG"], "ms": 6, "lw": 1.6}
    left.plot(temperatures, [100 * point["accuracy"] for point in good], **look, label="permAVG")
    middle.plot(temperatures, [point["nll"] for point in good], **look)
    references = _references(left, middle, averages) if averages else []
    _log_if_wide(middle, [*(point["nll"] for point in good), *references] or [1.0])
    _draw_softness_by_temperature(right, good, shown)
    less = describe_omitted(kinds, shown, "sweep.json")
    beside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "frameon": False, "alignment": "left"}
    right.legend(**beside, borderpad=0, borderaxespad=0, fontsize=8, title_fontsize=8, title=fill(less, 30) or None)
    labels = ("accuracy on test data (%)", "NLL on test data (nats)", "softness")
    for axes, label in zip((left, middle, right), labels, strict=True):
        axes.set_ylabel(label)
        _by_temperature(axes, points)
    whose = f" of members 1 to {next(iter(averages['permAVG']))}" if averages else ""
    left.set_title(f"permAVG{whose} at several temperatures", loc="left", size=11, pad=24)
    legend_above(left, left.get_legend_handles_labels()[0], ncols=3, columnspacing=1.0, fontsize=9)
    left.get_legend().set_in_layout(False)  # it may be wider than its panel
    return figure


def _references(left: Any, middle: Any, averages: Mapping[str, Any]) -> list[float]:
    """Draw lines for the merged members, which remain visible where they coincide, and return their NLLs."""
    looks = {"ensemble": {"ls": "-", "lw": 4, "alpha": 0.45}, "mean member": {"ls": (0, (4, 2)), "lw": 1.2}}
    scores = {name: next(iter(averages[name].values())) for name in looks}
    for name, look in looks.items():
        left.axhline(100 * scores[name]["accuracy"], color=LOOKS[name]["color"], zorder=1.5, **look, label=name)
        middle.axhline(scores[name]["nll"], color=LOOKS[name]["color"], zorder=1.5, **look)
    return [each["nll"] for each in scores.values()]


def _draw_softness_by_temperature(axes: Any, good: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> None:
    temperatures = [point["temperature"] for point in good]
    for kind, colour, marker in zip(kinds, GROUPS, SHAPES, strict=False):
        means = [kind.mean(point["softness"]) for point in good]
        label = kind.name + (f", mean of {len(kind.groups)}" if len(kind.groups) > 1 else "")
        axes.plot(temperatures, means, color=colour, marker=marker, ms=5.5, lw=1.4, label=label)
    axes.set_ylim(-0.03, 1.03)


def _by_temperature(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xlabel("temperature τ (log scale)")
    axes.set_xscale("log")
    axes.set_xticks([point["temperature"] for point in points], [f"{point['temperature']:g}" for point in points])
    axes.minorticks_off() if axes.get_yscale() == "linear" else axes.xaxis.minorticks_off()
    for point in (each for each in points if each["failed"] is not None):
        axes.axvline(point["temperature"], color=FAINT, lw=1, ls=":")
        place = (point["temperature"], 0.5)
        axes.text(*place, "singular", transform=axes.get_xaxis_transform(), rotation=90, size=8, color=FAINT)


def draw_averages(averages: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw the accuracy of averaged weights by the number of members."""
    figure, (axes,) = _figure(5.5, 3.5)
    alone = averages["naive"]["1"]["accuracy"]
    merged = next(iter(averages["permAVG"]))
    for name in ("naive", "weight matching", "permAVG", "ensemble"):
        rows = averages[name]
        counts = [int(count) for count in rows]
        values = [100 * row["accuracy"] for row in rows.values()]
        if name == "weight matching":
            counts, values = [1, *counts], [100 * alone, *values]
        aside = {"permAVG": -0.15, "ensemble": 0.15}.get(name, 0.0)  # they may be equally good
        look = {**LOOKS[name], "ms": 6.5, "lw": 1.6, "ls": "" if aside else LOOKS[name]["ls"]}
        axes.plot([count + aside for count in counts], values, **look, label=name)
    axes.set_xticks(range(1, 1 + max(int(count) for count in averages["naive"])))
    axes.set_xlabel(
        f"members averaged (1: mean member)\npermAVG and the ensemble, of {merged}, stand to its left and right"
    )
    axes.set_ylabel("accuracy on test data (%)")
    axes.set_title("Averages of members' weights", loc="left", size=11, pad=24)
    legend_above(axes, axes.get_legend_handles_labels()[0], ncols=4, columnspacing=1.0, fontsize=9)
    return figure


def draw_planted(points: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the fraction of a planted permutation that is recovered, by noise."""
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
    """Draw the accuracy of two members that were trained on different tasks, and of their averages."""
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
    axes.set_title("Members trained on different tasks", loc="left", size=11, pad=24)
    legend_above(axes, handles, ncols=4, columnspacing=1.2, fontsize=9)
    return figure


DRAWINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # figure -> the part it needs alone
    "rows": ("rows", draw_rows),
    "softness": ("matrices", draw_softness),
    "averages": ("averages", draw_averages),
    "planted": ("planted", draw_planted),
    "different": ("different", draw_different),
}
