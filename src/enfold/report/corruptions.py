"""Figures of scores on corrupted images: heat maps of kinds and models, box plots by severity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from enfold.analysis.corruptions import ByKind, SeedScores
from enfold.errors import EnfoldError, closest
from enfold.report.figure import FAINT, INK, legend_above

# A palette for all kinds of colour vision (M. Okabe and K. Ito, 2008), in the order mean member, ensemble, ...
COLOURS = ("#CC79A7", "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#777777")
TITLES = {
    "accuracy": "accuracy (%)",
    "nll": "NLL (nats)",
    "ece": "ECE (%)",
    "brier": "Brier score",
}
PERCENT = ("accuracy", "ece")

Seeds = Sequence[Mapping[str, ByKind]]  # results of `corrupted_scores`, one per seed


def select_models(seeds: Seeds, models: Sequence[str] | None) -> list[str]:
    """Return the models that all seeds have, or the requested ones."""
    if not seeds:
        raise EnfoldError("seeds must contain the scores of at least one seed, got none: evaluate the run first")
    known = [label for label in seeds[0] if all(label in seed for seed in seeds)]
    for label in models or ():
        if label not in known:
            near = closest(label, known)
            hint = f"did you mean '{near}'?" if near else f"choose among {', '.join(known)}"
            raise EnfoldError(f"models must have scores for every seed, got '{label}': {hint}")
    return list(models) if models else known


def draw_heat_map(found: Mapping[str, Mapping[str, Mapping[str, SeedScores]]], metric: str, seeds: int) -> Any:
    """Return a heat map of kinds and models: means over severities and seeds, darker is worse."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models, kinds = list(found), list(next(iter(found.values())))
    scale = 100 if metric in PERCENT else 1
    values = np.array([[scale * found[label][kind]["mean"].mean for label in models] for kind in kinds])
    values = np.concatenate([values, values.mean(0, keepdims=True)])
    figure = Figure(figsize=(2.6 + 0.62 * len(models), 1.9 + 0.29 * (len(kinds) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis" if metric == "accuracy" else "cividis_r", aspect="auto")
    axes.set_yticks(range(len(kinds) + 1), [kind.replace("_", " ") for kind in kinds] + ["mean"])
    axes.set_xticks(range(len(models)), models, rotation=40, ha="right", rotation_mode="anchor")
    axes.axhline(len(kinds) - 0.5, color="white", lw=3)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        light = sum(w * c for w, c in zip((0.299, 0.587, 0.114), image.cmap(image.norm(value)), strict=False))
        text = f"{value:.1f}" if metric in PERCENT else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", size=8, color="black" if light > 0.5 else "white")
    over = f"mean over severities and {seeds} seed{'s' if seeds > 1 else ''}"
    axes.set_title(f"{TITLES[metric]} on corrupted test images, {over}", loc="left", size=10)
    return figure


def draw_boxes(found: Mapping[str, Mapping[str, Mapping[str, SeedScores]]], metric: str, seeds: int) -> Any:
    """Return box plots by severity, one box per model: quartiles over kinds of the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    models = list(found)
    if len(models) > len(COLOURS):
        raise EnfoldError(f"box plots show at most {len(COLOURS)} models, got {len(models)}: select some of them")
    severities = [each for each in next(iter(next(iter(found.values())).values())) if each != "mean"]
    scale = 100 if metric in PERCENT else 1
    figure = Figure(figsize=(max(5.0, 1.6 + 0.28 * len(models) * len(severities)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(models)
    for index, label in enumerate(models):
        values = [[scale * each[severity].mean for each in found[label].values()] for severity in severities]
        places = [place + (index - (len(models) - 1) / 2) * width for place in range(len(severities))]
        parts = axes.boxplot(values, positions=places, widths=0.8 * width, whis=(0, 100), patch_artist=True)
        for box in parts["boxes"]:
            box.set(facecolor=COLOURS[index], edgecolor=INK, lw=0.8)
        for line in (*parts["whiskers"], *parts["caps"], *parts["medians"]):
            line.set(color=INK, lw=0.8)
    axes.set_xticks(range(len(severities)), severities)
    axes.set_xlim(-0.5, len(severities) - 0.5)
    axes.set_xlabel("severity of corruption")
    axes.set_ylabel(TITLES[metric])
    axes.grid(visible=False, axis="x")
    over = (
        f"boxes: quartiles over {len(next(iter(found.values())))} kinds, mean of {seeds} seed{'s' if seeds > 1 else ''}"
    )
    axes.set_title(over, loc="left", size=9, color=FAINT, pad=24)
    handles = [Patch(facecolor=COLOURS[i], edgecolor=INK, lw=0.8, label=label) for i, label in enumerate(models)]
    legend_above(axes, handles, ncols=len(models), columnspacing=1.2, fontsize=9)
    return figure
