"""Figures of a loss landscape, with captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enfold.io.files import write_json
from enfold.report.figure import FAINT, INK, write_figure
from enfold.report.landscape_captions import CAPTIONS, group_name

Array = npt.NDArray[Any]
Arrays = Mapping[str, Any]  # tensors or arrays by name
Facts = Mapping[str, Any]

# A palette for all kinds of colour vision (M. Okabe and K. Ito, 2008); markers and dashes differ too.
RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SAMPLES = {"random": "x", "dropout": "+", "gaussian": "s", "pca": "D", "pca_random": "<"}
SHAPES = {"training": ".", "averaged": "*", **SAMPLES}
HOLLOW = ("s", "D", "<")
GROUPS = {
    "original": ("#333333", "-", "o"),
    "independent training": ("#333333", "-", "o"),
    "independent trainings": ("#333333", "-", "o"),
    "averaged": ("#CC79A7", "--", "*"),
    "random": ("#E69F00", ":", "x"),
    "dropout": ("#56B4E9", "-.", "+"),
    "gaussian": ("#009E73", "--", "s"),
    "pca": ("#D55E00", ":", "D"),
    "pca_random": ("#0072B2", "-.", "<"),
}
PATHS = {
    "straight": ("#777777", "--"),
    "matched": ("#56B4E9", "-."),
    "bezier": ("#D55E00", "-"),
    "tunnel": ("#009E73", "-"),
}
NAMED = {"accuracy": "accuracy (%)", "nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE (%)"}
PERCENT = ("accuracy", "ece")
LOSS = "loss (nats), log scale"
LOW, HIGH = "cividis", "cividis_r"  # also readable in grey


def draw_landscape(parts: Mapping[str, tuple[Facts, Arrays]], folder: Path) -> list[Path]:
    """Write every available figure as SVG and PNG, and list them with caption and alt text in figures.json."""
    written, listed = [], []
    for name, (content, tensors) in parts.items():
        arrays = {key: np.asarray(tensor) for key, tensor in tensors.items()}
        make = partial(DRAWINGS[name], content["facts"], arrays)
        written += write_figure(make, folder, name, "the figures of a landscape")
        listed.append({"file": f"{name}.svg", **CAPTIONS[name](content["facts"], arrays, content["settings"])})
    write_json(folder / "figures.json", {"figures": listed})
    return [*written, folder / "figures.json"]


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **changes: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **changes)


def draw_similarity(facts: Facts, arrays: Arrays) -> Any:
    """Return the figure of both similarity matrices, one block per training."""
    figure, ((left, right),) = _figure(8.4, 4.1, 1, 2)
    member = arrays["member"]
    starts = [int(np.argmax(member == run)) for run in np.unique(member)]
    ends = [*starts[1:], len(member)]
    scales = (("cosine", "cosine of the weights", 1.0, LOW), ("disagreement", "disagreement (%)", 100.0, HIGH))
    for axes, (name, title, scale, colours) in zip((left, right), scales, strict=True):
        matrix = scale * arrays[name]
        low = min(0.0, float(matrix.min())) if name == "cosine" else 0.0
        trained = arrays["epoch"] != 0  # untrained networks would dominate the scale
        high = float(matrix[np.ix_(trained, trained)].max())
        image = axes.imshow(matrix, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        figure.colorbar(image, ax=axes, shrink=0.8, pad=0.03)
        axes.set_title(title, loc="left", size=11)
        axes.grid(visible=False)
        for border in starts[1:]:
            for line in (axes.axhline, axes.axvline):
                line(border - 0.5, color="white", lw=1.5)
        middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
        words = [f"run {int(run) + 1}" for run in np.unique(member)]
        axes.set_xticks(middles, words)
        axes.set_yticks(middles, words, rotation=90, va="center")
        axes.tick_params(length=0)
    if facts["trajectory"]:
        left.set_xlabel("epochs of each run, first to last", color=FAINT)
    return figure


def draw_map(facts: Facts, arrays: Arrays) -> Any:
    """Return the maps of predictions by t-SNE and by principal components."""
    from matplotlib.lines import Line2D

    figure, (panels,) = _figure(9, 4.9, 1, 2)
    kinds, runs = list(facts["kinds"]), np.unique(arrays["member"])
    for axes, (name, title) in zip(panels, (("tsne", "t-SNE"), ("pca", "principal components")), strict=True):
        for run in runs:
            colour = RUNS[int(run) % len(RUNS)]
            for index, kind in enumerate(kinds):
                chosen = (arrays["member"] == run) & (arrays["kind"] == index)
                _plot_kind(axes, arrays[name][chosen], kind, colour)
        axes.set_title(title, loc="left", size=11)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color("#b0b0b0")
    handles = [Line2D([], [], color=RUNS[int(run) % len(RUNS)], lw=3, label=f"run {int(run) + 1}") for run in runs]
    words = {"training": "epochs of training", "averaged": "averaged weights"}
    handles += [
        Line2D(
            [],
            [],
            ls="",
            color=INK,
            marker=SHAPES[kind],
            ms=9 if kind in ("averaged", "training") else 6,
            **_hollow(kind, INK),
            label=words.get(kind, _group_label(kind)),
        )
        for kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, handlelength=1, fontsize=9)
    return figure


def _hollow(kind: str, colour: str) -> dict[str, Any]:
    return {"mfc": "none", "mec": colour} if SHAPES[kind] in HOLLOW else {}


def _group_label(group: str) -> str:
    return f"{group_name(group)} samples" if group in SAMPLES else group


def _plot_kind(axes: Any, points: Array, kind: str, colour: str) -> None:
    if kind == "training":
        axes.plot(*points.T, color=colour, lw=1, alpha=0.7, zorder=1)
        axes.scatter(*points.T, s=np.linspace(6, 40, len(points)), color=colour, lw=0, zorder=2)
        return
    style = {"mec": "white", "mew": 0.7, "ms": 13} if kind == "averaged" else {"ms": 5, **_hollow(kind, colour)}
    axes.plot(*points.T, SHAPES[kind], color=colour, zorder=4 if kind == "averaged" else 3, **style)


def draw_diversity(facts: Facts, arrays: Arrays) -> Any:
    """Return the figure of diversity against accuracy with both limits."""
    figure, ((axes,),) = _figure(7, 4.6)
    a = 100 * arrays["limits/accuracy"]
    axes.plot(a, arrays["limits/upper"], color=INK, lw=1.2)
    axes.plot(a, arrays["limits/lower"], color=INK, lw=1.2, ls="--")
    axes.fill_between(a, arrays["limits/lower"], arrays["limits/upper"], color="#f4f4f4", zorder=0)
    seen = np.concatenate([100 * arrays[f"{group}/accuracy"] for group in facts["groups"]])
    low = max(float(a[0]), float(np.quantile(seen, 0.1)) - 8)
    colours = iter(("#882255", "#44AA99", "#AA4499", "#117733", "#999933", "#332288", "#661100"))
    handles = []
    for group in facts["groups"]:
        colour, _, marker = GROUPS.get(group, ("", "", "^" if group.startswith("ensemble") else "v"))
        colour = colour or next(colours, FAINT)
        filled = {"mfc": "none"} if marker in HOLLOW else {}
        x, y = 100 * arrays[f"{group}/accuracy"], arrays[f"{group}/diversity"]
        shown = np.isfinite(y) & (x >= low)
        label = {"averaged": "averaged weights"}.get(group, _group_label(group))
        label += "" if shown.any() else f" (at {x.mean():.0f} %, off the scale)"
        size = {"*": 12, "o": 7}.get(marker, 6)
        handles += axes.plot(x[shown], y[shown], marker, ls="", color=colour, ms=size, label=label, **filled)
    base = 100 * facts["base_accuracy"]
    axes.axvline(base, color=FAINT, lw=1, ls=":")
    above = axes.get_xaxis_transform()
    axes.annotate("base", (base, 1), (0, 3), above, "offset points", size=9, color=FAINT, ha="center")
    _name_limits(axes, arrays, low)
    axes.set_xlim(low, max(base, float(seen.max())) + 0.02 * (base - low))
    axes.set_ylim(-0.03, 1.04 * float(np.nanmax(arrays["limits/upper"])))
    axes.set_xlabel("accuracy (%)")
    axes.set_ylabel("disagreement / error rate")
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9, borderaxespad=0)
    return figure


def _name_limits(axes: Any, arrays: Arrays, low: float) -> None:
    """Label both curves."""
    a = 100 * arrays["limits/accuracy"]
    at = int(np.argmin(abs(a - (low + 0.55 * (a[-1] - low)))))
    for name, word, below in (("upper", "independent errors", False), ("lower", "base with random changes", True)):
        axes.annotate(
            word,
            (a[at], arrays[f"limits/{name}"][at]),
            (-4, -4 if below else 4),
            textcoords="offset points",
            ha="right",
            va="top" if below else "bottom",
            size=9,
            color=INK,
        )


def draw_paths(facts: Facts, arrays: Arrays) -> Any:
    """Return the figure of loss, accuracy and disagreement along every path."""
    figure, (panels,) = _figure(9.6, 3.9, 1, 3)
    colours = iter(("#CC79A7", "#E69F00", "#0072B2"))
    handles = []
    for path in facts["paths"]:
        colour, dashes = PATHS.get(path) or (next(colours, FAINT), ":")
        t = arrays[f"{path}/t"]
        handles += panels[0].plot(t, arrays[f"{path}/loss"], color=colour, ls=dashes, lw=1.8, label=_path_name(path))
        panels[1].plot(t, 100 * arrays[f"{path}/accuracy"], color=colour, ls=dashes, lw=1.8)
        if not path.startswith("ensemble"):
            for end, width in ((0, 1.8), (1, 0.9)):
                panels[2].plot(t, 100 * arrays[f"{path}/disagreement"][end], color=colour, ls=dashes, lw=width)
    titles = ("loss (nats)", "accuracy (%)", "disagreement with an end (%)")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", size=11)
        axes.set_xticks([0, 0.5, 1], ["run 1", "middle", "run 2"])
    panels[2].set_xlabel("thick: with run 1, thin: with run 2", color=FAINT)
    losses = np.concatenate([arrays[f"{path}/loss"] for path in facts["paths"]])
    if losses.max() > 8 * max(losses.min(), 1e-9):
        _log_scale(panels[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=2)
    return figure


def _path_name(path: str) -> str:
    return {"matched": "straight, units matched", "bezier": "Bézier curve"}.get(path, path)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_plane(facts: Facts, arrays: Arrays) -> Any:
    """Return the maps of loss or accuracy and disagreement over a plane of weights."""
    from matplotlib.colors import PowerNorm  # resolves small disagreements

    radial = facts["kind"] == "radial"
    maps = [("accuracy (%)", 100 * arrays["accuracy"], LOW)]
    if not radial:
        maps.insert(0, (LOSS, np.log10(arrays["loss"]), HIGH))
    for run in range(2 if radial else 1):
        maps.append((f"disagreement with run {run + 1} (%)", 100 * arrays["disagreement"][run], HIGH))
    u, v = arrays["u"], arrays["v"]
    figure, (panels,) = _figure(10.2, 1.2 + 3.05 * np.ptp(v) / np.ptp(u), 1, 3, sharey=True)  # equal scales
    for axes, (title, values, colours) in zip(panels, maps, strict=True):
        norm = PowerNorm(0.5, 0, max(float(values.max()), 1.0)) if title.startswith("disagreement") else None
        shown = axes.pcolormesh(u, v, values, cmap=colours, norm=norm, shading="nearest", rasterized=True)
        if np.ptp(values):
            levels: Any = 8 if norm is None else (5, 10, 20, 40, 60, 80)
            axes.contour(u, v, values, levels=levels, colors="white", linewidths=0.4, linestyles="solid", alpha=0.7)
        bar = figure.colorbar(shown, ax=axes, orientation="horizontal", shrink=0.9, pad=0.02, aspect=30)
        if norm is not None:
            bar.set_ticks([tick for tick in (0, 5, 10, 20, 40, 60, 80, 100) if tick <= values.max()])
        if title == LOSS:
            ticks = [step * 10.0**power for power in range(-4, 4) for step in (1, 2, 3, 5)]
            ticks = [tick for tick in ticks if values.min() <= np.log10(tick) <= values.max()]
            bar.set_ticks(np.log10(ticks).tolist(), labels=[f"{tick:g}" for tick in ticks])
        axes.set_title(title, loc="left", size=11)
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.set_xlabel("first axis (norm of weights)", size=9, color=FAINT)
        _mark(axes, arrays["places"], radial)
        axes.set_xlim(u[0], u[-1])
        axes.set_ylim(v[0], v[-1])
    panels[0].set_ylabel("second axis", size=9, color=FAINT)
    return figure


def _mark(axes: Any, places: Array, origin: bool) -> None:
    from matplotlib.patheffects import withStroke

    marks = [(place, f"run {index + 1}") for index, place in enumerate(places)]
    if origin:
        marks.append((np.zeros(2), "origin"))
        for place in places:
            axes.plot(*(2 * np.stack([np.zeros(2), place])).T, color="white", lw=0.8, ls=":")
    for place, word in marks:
        axes.plot(*place, "o", ms=6, mfc="white", mec=INK, zorder=4)
        text = axes.annotate(word, place, (6, 6), textcoords="offset points", size=9, color=INK, zorder=5)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def draw_sizes(facts: Facts, arrays: Arrays) -> Any:
    """Return the figure of scores by number of modes, by samples of one mode, and by severity."""
    severities = facts["severities"]
    rows = ["modes", *(["samples"] if facts["within"] else []), *(["severity"] if len(severities) > 1 else [])]
    figure, panels = _figure(10.2, 2.7 * len(rows) + 0.6, len(rows), 4)
    place = {row: panels[index] for index, row in enumerate(rows)}
    if "samples" in place:
        for upper, lower in zip(place["modes"], place["samples"], strict=True):
            lower.sharey(upper)
    handles: list[Any] = []
    for group in facts["groups"]:
        colour, dashes, marker = GROUPS[group]
        style = {"color": colour, "ls": dashes, "marker": marker, "ms": 5, "lw": 1.4}
        style |= {"mfc": "none"} if marker in HOLLOW else {}
        for column, score in enumerate(NAMED):
            scale = 100 if score in PERCENT else 1
            line = _plot_counts(
                place["modes"][column], scale * arrays[f"{group}/0/{score}"], **style, label=group_name(group)
            )
            handles += line if column == 0 else []
            if group in facts["within"]:
                _plot_counts(place["samples"][column], scale * arrays[f"{group}/within/{score}"], **style)
            if "severity" in place:
                ends = [scale * arrays[f"{group}/{severity}/{score}"][[0, -1]] for severity in severities]
                place["severity"][column].plot(severities, [end[1] for end in ends], **style)
                place["severity"][column].plot(severities, [end[0] for end in ends], **{**style, "alpha": 0.35})
    _name_sizes(place, arrays, facts)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _plot_counts(axes: Any, values: Array, **style: Any) -> list[Any]:
    """Plot values for 1, 2, 3, ... items."""
    lines: list[Any] = axes.plot(range(1, len(values) + 1), values, **style)
    return lines


def _name_sizes(place: Mapping[str, Any], arrays: Arrays, facts: Facts) -> None:
    from matplotlib.ticker import MaxNLocator

    count = len(arrays[f"{facts['groups'][0]}/0/nll"])
    words = {"modes": "modes", "samples": "samples of one mode", "severity": "severity of corruption"}
    for row, panels in place.items():
        for axes in panels:
            axes.set_xlabel(words[row])
            axes.yaxis.set_major_locator(MaxNLocator(5))
            if row == "severity":
                axes.set_xticks(facts["severities"])
            else:
                axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for axes, title in zip(place["modes"], NAMED.values(), strict=True):
        axes.set_title(title, loc="left", size=11)
    if "severity" in place:
        place["severity"][0].set_ylabel(f"pale: 1 mode; full: {count}", color=FAINT, size=9)


def draw_ood(facts: Facts, arrays: Arrays) -> Any:
    """Return the dot plot of the Jensen-Shannon divergence, one row per set and one marker per group."""
    sets = facts["sets"]
    figure, ((axes,),) = _figure(7.6, 1.5 + 0.42 * len(sets))
    handles = []
    for group in facts["groups"]:
        colour, _, marker = GROUPS[group]
        filled = {"mfc": "none"} if marker in HOLLOW else {}
        values = [float(arrays[f"{group}/{where}"]) for where in sets]
        label = _group_label(group)
        handles += axes.plot(values, range(len(sets)), marker, ls="", color=colour, ms=7, label=label, **filled)
    axes.set_yticks(range(len(sets)), sets)
    axes.set_ylim(len(sets) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_xlabel(f"Jensen-Shannon divergence of {facts['networks']} networks (nats)")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


DRAWINGS: dict[str, Callable[[Facts, Arrays], Any]] = {
    "similarity": draw_similarity,
    "map": draw_map,
    "diversity": draw_diversity,
    "paths": draw_paths,
    "radial": draw_plane,
    "three": draw_plane,
    "sizes": draw_sizes,
    "ood": draw_ood,
}
