"""Draw accuracy by the number of members, of permAVG and what it is held against: python tools/make_scaling_figure.py

Reads results/reproduce-permavg-table.json, writes docs/images/permavg-scaling.png. Differences are to the mean member
of as many members, of our networks and of the thesis's each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from enfold.report.figure import INK, KINDS, write_figure
from grid_tables import SIZES

ROOT = Path(__file__).parent.parent
DATA = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
LAYERS = ("2", "3", "4")
MEMBER = "mean member of ensemble of {}"
TICKS = (-40, -10, -4, -2, -1, 0, 1, 2, 4)
LINEAR = 2.0  # points on either side of 0; beyond, the scale is logarithmic
LINES = {  # what is drawn, of whose networks, and how
    "ensemble": ("ensemble of {}", "ours", {"color": KINDS["ensemble"].colour, "marker": "s"}),
    "permAVG at its best": ("perm-avg-best-{}", "ours", {"color": KINDS["fold"].colour, "marker": "D"}),
    "a fresh student": ("kd-{}", "ours", {"color": KINDS["share"].colour, "marker": "^"}),
    "permAVG as published, our networks": ("perm-avg-{}", "ours", {"color": INK, "marker": "o"}),
    "permAVG in the thesis": ("perm-avg-{}", "published", {"color": INK, "marker": "o", "ls": ":", "mfc": "white"}),
}


def points(rows: dict[str, Any], run: str, pattern: str, whose: str) -> list[float | None]:
    """Points above the mean member, by the number of members."""
    found = []
    for size in SIZES:
        pair = [rows.get(f"{run}/{each.format(size)}", {}).get("accuracy", {}).get(whose) for each in (pattern, MEMBER)]
        values = [each["mean"] if isinstance(each, dict) else each for each in pair]
        found.append(None if None in values else 100 * (values[0] - values[1]))
    return found


def draw(content: dict[str, Any], kind: str) -> Any:
    """A panel for each data set and number of layers."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    rows = {row["label"]: row["metrics"] for row in content["rows"]}
    figure, panels = pyplot.subplots(
        len(DATA), len(LAYERS), figsize=(9.6, 5.6), sharex=True, sharey=True, squeeze=False
    )
    for line, (data, title) in zip(panels, DATA.items(), strict=True):
        for axes, layers in zip(line, LAYERS, strict=True):
            for name, (pattern, whose, look) in LINES.items():
                found = points(rows, f"{data}-{layers}{kind}", pattern, whose)
                axes.plot(list(SIZES), found, label=name, lw=1.6, ms=4.5, **look)
            axes.axhline(0, color=INK, lw=0.8)
            axes.set_yscale("symlog", linthresh=LINEAR)
            axes.set_yticks(TICKS, [str(tick) for tick in TICKS], minor=False)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{title}, {layers} layers", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("members")
        axes.set_xticks(list(SIZES))
    figure.supylabel("accuracy above a member (points)", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def main() -> None:
    """Draw what the record holds."""
    content = json.loads((ROOT / "results" / "reproduce-permavg-table.json").read_text(encoding="utf-8"))
    alt = "Accuracy above the mean member by the number of members, for 2, 3 and 4 layers on two data sets"
    for file in write_figure(lambda: draw(content, ""), ROOT / "docs" / "images", "permavg-scaling", "the figure", alt):
        print(f"written: {file}")


if __name__ == "__main__":
    main()
