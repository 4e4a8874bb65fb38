"""Figures of uncertainty: reliability, risk and coverage, OOD scores as histograms and ROC curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import ReliabilityBand
from enfold.report.corruptions import COLOURS
from enfold.report.figure import FAINT, INK, legend_above

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))  # curves do without colour
TEST, OOD = "#0072B2", "#D55E00"
BINS = 40

Curves = Mapping[str, tuple[Tensor, Tensor]]


def draw_reliability(models: Mapping[str, ReliabilityBand]) -> Any:
    """Return reliability diagrams: accuracy in bins of confidence with a bootstrap band, one panel per model."""
    _require(models)
    figure, panels = _panels(len(models), rows=2, width=2.6, height=3.7, ratios=(3, 1))
    for column, (label, band) in enumerate(models.items()):
        diagram, (top, below) = band.diagram, panels[:, column]
        filled = (diagram.counts > 0).numpy()
        confidence, accuracy = (100 * each.numpy()[filled] for each in (diagram.confidence, diagram.accuracy))
        low, high = (100 * each.numpy()[filled] for each in (band.lower, band.upper))
        top.plot([0, 100], [0, 100], color=FAINT, lw=0.8, ls=":")
        top.fill_between(confidence, low, high, color=TEST, alpha=0.2, lw=0)
        top.plot(confidence, accuracy, "o-", color=TEST, ms=4, lw=1.2)
        edges = 100 * diagram.edges.numpy()
        below.bar(edges[:-1], diagram.counts.numpy(), np.diff(edges), align="edge", color=FAINT, ec="white", lw=0.5)
        top.set_title(label, loc="left", size=10)
        top.set(xlim=(0, 100), ylim=(0, 100))
        top.tick_params(labelbottom=False)
        below.set(xlim=(0, 100), xlabel="confidence (%)")
    panels[0, 0].set_ylabel(f"accuracy (%), {100 * next(iter(models.values())).level:.0f} % band")
    panels[1, 0].set_ylabel("examples")
    return figure


def draw_curves(curves: Curves, across: str, up: str) -> Any:
    """Return curves, one per name."""
    _require(curves)
    from matplotlib.lines import Line2D

    figure, panels = _panels(1, width=4.6, height=3.8)
    axes, handles = panels[0, 0], []
    for index, (label, (x, y)) in enumerate(curves.items()):
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "ls": DASHES[index % len(DASHES)],
            "lw": 1.4,
        }
        axes.plot(x.numpy(), y.numpy(), **style)
        handles.append(Line2D([], [], label=label, **style))
    axes.set(xlabel=across, ylabel=up, xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.legend(handles=handles, frameon=False, fontsize=9, handlelength=2.6)
    return figure


def draw_roc(curves: Curves) -> Any:
    """Return ROC curves of false and true positive rates (from `enfold.metrics.roc`), one per name."""
    shown = {label: (100 * false, 100 * true) for label, (false, true) in curves.items()}
    figure = draw_curves(shown, "false positive rate (%)", "true positive rate (%)")
    figure.axes[0].plot([0, 100], [0, 100], color=FAINT, lw=0.8, ls=":", zorder=1)
    figure.axes[0].set(aspect="equal", ylim=(0, 101))
    figure.set_size_inches(4.3, 4.2)
    return figure


def draw_histograms(scores: Mapping[str, tuple[Tensor, Tensor]], score: str) -> Any:
    """Return histograms of one score on test images (first) and OOD images (second), one panel per name."""
    _require(scores)
    from matplotlib.patches import Patch

    figure, panels = _panels(len(scores), width=2.8, height=2.9)
    every = torch.cat([values for pair in scores.values() for values in pair])
    edges = np.linspace(float(every.min()), max(float(every.max()), float(every.min()) + 1e-9), BINS + 1)
    for axes, (label, (test, ood)) in zip(panels[0], scores.items(), strict=True):
        for values, colour, filled in ((test, TEST, True), (ood, OOD, False)):
            heights, _ = np.histogram(values.numpy(), edges)
            fractions = 100 * heights / len(values)
            if filled:
                axes.stairs(fractions, edges, fill=True, color=colour, alpha=0.35, lw=0)
            axes.stairs(fractions, edges, color=colour, lw=1.3)
        axes.set_title(label, loc="left", size=10, color=INK, pad=22)
        axes.set_xlabel(score)
    panels[0, 0].set_ylim(bottom=0)
    panels[0, 0].set_ylabel("images (%)")
    handles = [
        Patch(fc=(*_rgb(TEST), 0.35), ec=TEST, label="test images"),
        Patch(fc="none", ec=OOD, label="OOD images"),
    ]
    legend_above(panels[0, 0], handles, ncols=2, columnspacing=1, fontsize=8)
    return figure


def _panels(columns: int, *, width: float, height: float, rows: int = 1, ratios: tuple[int, ...] = (1,)) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.6 + width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        rows, columns, squeeze=False, sharey="row", gridspec_kw={"height_ratios": ratios} if rows > 1 else {}
    )
    return figure, panels


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def _require(models: Mapping[str, Any]) -> None:
    if not models:
        raise EnfoldError("models must contain at least one entry, got none: pass {name: results}")
