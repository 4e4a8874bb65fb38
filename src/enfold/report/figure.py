"""Figures from stored results: quality against cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enfold.errors import MissingExtra
from enfold.files import atomic_path

# Colours that people with any colour vision tell apart (M. Okabe and K. Ito, 2008).
COLOURS = {"member": "#56B4E9", "ensemble": "#0072B2", "control": "#999999", "fold": "#D55E00"}


def quality_cost(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """NLL against the operations of one prediction, as SVG and PNG; models far off the scale are named at its edge."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "the quality-cost figure") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {name: row for name, row in summary["rows"].items() if row.get("cost")}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        _points(axes, rows)
        axes.set_xlabel("cost of one prediction (operations, ratio to one network)")
        axes.set_ylabel("NLL on test data (nats; up is better)")
        axes.set_title("The quality of an ensemble at the price of one network", loc="left")
        written = []
        for ending in ("svg", "png"):
            path = folder / f"quality-cost.{ending}"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format=ending, dpi=160, metadata={"Date": None} if ending == "svg" else None)
            written.append(path)
        plt.close(figure)
    return written


STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "svg.hashsalt": "enfold",
}


def _kind(name: str) -> str:
    if name == "mean member":
        return "member"
    if name.startswith("ensemble"):
        return "ensemble"
    return "control" if name.startswith("control") else "fold"


def _points(axes: Any, rows: Mapping[str, Any]) -> None:
    nll = {name: row["scores"]["nll"]["mean"] for name, row in rows.items()}
    span = abs(nll["mean member"] - nll["ensemble"])
    near = {name: value for name, value in nll.items() if value <= nll["mean member"] + 5 * span}
    for name, value in near.items():
        row, kind = rows[name], _kind(name)
        deviation = row["scores"]["nll"]["std"]
        axes.errorbar(
            row["cost"]["ratios"]["flops"], value, yerr=deviation, fmt="o", ms=8, color=COLOURS[kind], capsize=3
        )
    _label(axes, {name: (rows[name]["cost"]["ratios"]["flops"], value) for name, value in near.items()})
    for name, colour in (("mean member", COLOURS["member"]), ("ensemble", COLOURS["ensemble"])):
        axes.axhline(nll[name], color=colour, lw=1, ls=":", zorder=0)
    away = [f"{name} ({value:.2f})" for name, value in nll.items() if name not in near]
    if away:
        text = "off the scale: " + ", ".join(away)
        axes.text(0.99, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", color="#666666")
    top = max(row["cost"]["ratios"]["flops"] for row in rows.values())
    axes.set_xlim(0, top * 1.25)
    axes.invert_yaxis()


def _label(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Names beside their points, pushed apart where points of one cost lie close together."""
    values = [value for _, value in points.values()]
    gap = 0.055 * ((max(values) - min(values)) or 1.0)
    last: dict[float, float] = {}
    for name, (cost, value) in sorted(points.items(), key=lambda item: item[1][1]):
        column = round(cost, 1)
        place = max(value, last.get(column, value - gap) + gap)
        last[column] = place
        axes.annotate(
            name,
            (cost, value),
            xytext=(cost + 0.12, place),
            va="center",
            color=COLOURS[_kind(name)],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
