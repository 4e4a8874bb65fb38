"""Draw docs/images/readme.svg, quality and cost of four models, from a stored result.

python tools/draw_readme_figure.py           draw the figure
python tools/draw_readme_figure.py --check   exit with 1 if its numbers are not those of the result
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results/demo.json"
FILE = ROOT / "docs/images/readme.svg"
TITLE = "enfold demo: four networks in one (images of clothes, 3 seeds)"
MODELS = {
    "mean member": ("one network", "#6b7785"),
    "control": ("one network, trained longer", "#6b7785"),
    "compress": ("one network by compress", "#d55e00"),
    "ensemble": ("ensemble of 4", "#0072b2"),
}
"""The rows of the record that are shown, from top to bottom, with title and colour."""


def numbers() -> dict[str, dict[str, float]]:
    """Return NLL with its deviation, accuracy in percent, and cost relative to one network."""
    rows: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    one = rows["mean member"]["cost"]["flops"]
    return {
        label: {
            "nll": rows[label]["scores"]["nll"]["mean"],
            "std": rows[label]["scores"]["nll"]["std"],
            "accuracy": 100 * rows[label]["scores"]["accuracy"]["mean"],
            "cost": rows[label]["cost"]["flops"] / one,
        }
        for label in MODELS
    }


def texts() -> list[str]:
    """Return the text beside each point."""
    return [
        f"{each['nll']:.3f} ± {each['std']:.3f},  {each['accuracy']:.1f} %,  {each['cost']:.0f}x the cost"
        for each in numbers().values()
    ]


def draw() -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "readme", "font.family": "sans-serif", "font.size": 12}
    )
    import matplotlib.pyplot as plt

    found = list(numbers().values())
    figure, axes = plt.subplots(figsize=(8.6, 2.7), layout="constrained")
    right = max(each["nll"] + each["std"] for each in found) + 0.03
    for place, (each, (_, colour), text) in enumerate(zip(found, MODELS.values(), texts(), strict=True)):
        axes.errorbar(each["nll"], place, xerr=each["std"], color=colour, fmt="o", markersize=9, capsize=4, linewidth=2)
        axes.text(right, place, text, va="center", color="#1a1a1a")
    ticks = [round(0.1 * tick, 1) for tick in range(4, int(10 * right) + 1)]
    axes.set_xticks(ticks)
    axes.set_xlim(ticks[0], right + 0.34)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(found)), [title for title, _ in MODELS.values()])
    axes.invert_yaxis()
    axes.set_xlabel("NLL on test data (lower is better), accuracy, cost of a prediction")
    axes.set_title(TITLE, fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FILE, metadata={"Date": None, "Title": TITLE}, facecolor="white")


def main(check: bool) -> int:
    """Draw the figure, or compare its texts."""
    if not check:
        draw()
        return 0
    drawn = FILE.read_text(encoding="utf-8")
    missing = [text for text in texts() if text not in drawn]
    for text in missing:
        print(f"{FILE} lacks '{text}': run python tools/draw_readme_figure.py", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
