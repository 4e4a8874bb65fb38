"""Draw docs/images/readme.svg, the accuracy and the cost of four models, from a stored result.

python tools/draw_readme_figure.py           draw the figure
python tools/draw_readme_figure.py --check   exit with 1 if its numbers are not those of the result
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "studies/latentbe/results/cifar10-distillation.json"
FILE = ROOT / "docs/images/readme.svg"
TITLE = "Four networks in one: CIFAR-10, 10,000 training images, 3 seeds"
MODELS = {
    "mean member": ("one network", "#6b7785"),
    "control": ("one network, trained longer", "#6b7785"),
    "ae-kd": ("distilled from the ensemble", "#d55e00"),
    "ensemble": ("ensemble of 4", "#0072b2"),
}
"""The rows of the record that are shown, from top to bottom, with title and colour."""


def numbers() -> dict[str, tuple[str, float, float, float]]:
    """Return title, accuracy and deviation in percent, and cost relative to one network."""
    rows: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    one = rows["mean member"]["cost"]["flops"]
    return {
        label: (
            title,
            100 * rows[label]["scores"]["accuracy"]["mean"],
            100 * rows[label]["scores"]["accuracy"]["std"],
            rows[label]["cost"]["flops"] / one,
        )
        for label, (title, _) in MODELS.items()
    }


def texts() -> list[str]:
    """Return the text beside each bar."""
    return [f"{mean:.1f} ± {std:.1f} %  at {cost:.0f}x the cost" for _, mean, std, cost in numbers().values()]


def draw() -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "readme", "font.family": "sans-serif", "font.size": 12}
    )
    import matplotlib.pyplot as plt

    found = list(numbers().values())
    figure, axes = plt.subplots(figsize=(8, 2.7), layout="constrained")
    right = max(mean + std for _, mean, std, _ in found) + 0.4
    for place, ((_, mean, std, _), text) in enumerate(zip(found, texts(), strict=True)):
        colour = list(MODELS.values())[place][1]
        axes.errorbar(mean, place, xerr=std, color=colour, fmt="o", markersize=9, capsize=4, linewidth=2)
        axes.text(right, place, text, va="center", color="#1a1a1a")
    axes.set_xlim(right=right + 3.6)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(found)), [title for title, *_ in found])
    axes.invert_yaxis()
    axes.set_xticks(range(int(found[0][1]), int(right) + 1))
    axes.set_xlabel("test accuracy (%)")
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
