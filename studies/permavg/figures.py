"""Draw the accuracy of merges by the number of members and by width: python -m studies.permavg.figures

Reads permavg-table.json and cifar10-merging.json and writes permavg-scaling.png and merging-width.png. In the first,
differences are to the mean member, for our networks and for the published ones.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from enfold.report.figure import INK, KINDS, write_figure
from studies.permavg.grid import SIZES

ROOT = Path(__file__).parent
DATA = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
LAYERS = ("2", "3", "4")
MEMBER = "mean member of ensemble of {}"
TICKS = (-40, -10, -4, -2, -1, 0, 1, 2, 4)
LINEAR = 2.0  # points on either side of 0; the scale is logarithmic beyond
LINES = {  # legend: label, our or published values, style
    "ensemble": ("ensemble of {}", "ours", {"color": KINDS["ensemble"].colour, "marker": "s"}),
    "permAVG, tuned": ("perm-avg-best-{}", "ours", {"color": KINDS["fold"].colour, "marker": "D"}),
    "student, random initialization": ("kd-{}", "ours", {"color": KINDS["share"].colour, "marker": "^"}),
    "permAVG as published, our networks": ("perm-avg-{}", "ours", {"color": INK, "marker": "o"}),
    "permAVG in the thesis": ("perm-avg-{}", "published", {"color": INK, "marker": "o", "ls": ":", "mfc": "white"}),
}

FAMILIES = {"resnet": "ResNet-8", "cnn": "plain convolutions"}
WIDTHS = (4, 8, 16)
BY_WIDTH = {  # legend: label for M members, style
    "ensemble": ("ensemble of {}", {"color": KINDS["ensemble"].colour, "marker": "s"}),
    "one member": ("mean member", {"color": KINDS["member"].colour, "marker": "o"}),
    "best member, trained further": ("control-2", {"color": KINDS["control"].colour, "marker": "X"}),
    "matched, REPAIR, distilled": ("route-{}", {"color": KINDS["fold"].colour, "marker": "D"}),
    "permAVG": ("perm-avg-{}", {"color": KINDS["share"].colour, "marker": "^"}),
    "matched, REPAIR": ("matched-repair-{}", {"color": INK, "marker": "v"}),
    "matched": ("matched-{}", {"color": INK, "marker": "v", "ls": "--", "mfc": "white"}),
    "average": ("average-{}", {"color": INK, "marker": "o", "ls": ":", "mfc": "white"}),
}


def points(rows: dict[str, Any], run: str, pattern: str, whose: str) -> list[float | None]:
    """Return the difference to the mean member in percentage points, by the number of members."""
    found = []
    for size in SIZES:
        pair = [rows.get(f"{run}/{each.format(size)}", {}).get("accuracy", {}).get(whose) for each in (pattern, MEMBER)]
        values = [each["mean"] if isinstance(each, dict) else each for each in pair]
        found.append(None if None in values else 100 * (values[0] - values[1]))
    return found


def by_members(content: dict[str, Any]) -> Any:
    """Return a figure with a panel for each data set and number of layers."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    rows = {row["label"]: row["metrics"] for row in content["rows"]}
    figure, panels = pyplot.subplots(
        len(DATA), len(LAYERS), figsize=(9.6, 5.6), sharex=True, sharey=True, squeeze=False
    )
    for line, (data, title) in zip(panels, DATA.items(), strict=True):
        for axes, layers in zip(line, LAYERS, strict=True):
            for name, (pattern, whose, look) in LINES.items():
                found = points(rows, f"{data}-{layers}", pattern, whose)
                axes.plot(list(SIZES), found, label=name, lw=1.6, ms=4.5, **look)
            axes.axhline(0, color=INK, lw=0.8)
            axes.set_yscale("symlog", linthresh=LINEAR)
            axes.set_yticks(TICKS, [str(tick) for tick in TICKS], minor=False)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{title}, {layers} layers", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("members")
        axes.set_xticks(list(SIZES))
    figure.supylabel("accuracy minus accuracy of one member (points)", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def by_width(content: dict[str, Any]) -> Any:
    """Return a figure with a panel for each kind of network and number of members."""
    from matplotlib import pyplot

    sizes = (2, 4)
    figure, panels = pyplot.subplots(len(FAMILIES), len(sizes), figsize=(9.6, 7.2), sharex=True, sharey=True)
    for line, (family, title) in zip(panels, FAMILIES.items(), strict=True):
        networks = [content["networks"][f"{family}-{width}"]["rows"] for width in WIDTHS]
        for axes, size in zip(line, sizes, strict=True):
            for name, (pattern, look) in BY_WIDTH.items():
                label = pattern.format(size) if size < max(sizes) or "ensemble" not in pattern else "ensemble"
                scores = [rows[label]["accuracy"] for rows in networks]
                mean, spread = ([100 * score[key] for score in scores] for key in ("mean", "std"))
                axes.errorbar(WIDTHS, mean, spread, label=name, lw=1.4, ms=5, elinewidth=0.8, capsize=2, **look)
            axes.set_xscale("log", base=2)
            axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
            axes.set_title(f"{title}, {size} members merged", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("channels of the first layer")
    figure.supylabel("accuracy (%)", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


FIGURES = {
    "permavg-scaling": (
        "permavg-table",
        by_members,
        "Accuracy minus that of the mean member by the number of members, for 2, 3 and 4 layers on two data sets",
    ),
    "merging-width": (
        "cifar10-merging",
        by_width,
        "Accuracy of merges of two and four networks by width, residual and plain convolutions",
    ),
}


def main() -> None:
    """Draw the figures from the stored results."""
    for name, (record, draw, alt) in FIGURES.items():
        content = json.loads((ROOT / "results" / f"{record}.json").read_text(encoding="utf-8"))
        for file in write_figure(partial(draw, content), ROOT / "images", name, "the figure", alt):
            if file.suffix == ".png":
                print(f"written: {file}")
            else:
                file.unlink()  # the page shows the PNG


if __name__ == "__main__":
    main()
