"""docs/versus.md and its figure, from results/versus.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PAGE, FIGURE = ROOT / "docs" / "versus.md", ROOT / "results" / "versus.svg"
LIMITS = re.compile("products|convolutions")
OWN = ("enfold", "enfold, bf16")
PLAIN = ("one network", "one network, bf16", "one network by enfold.fit", "plain loop", "plain loop, bf16", "by hand")
Cell = Mapping[str, float]
INTRODUCTION = """# enfold beside other packages

The same work by enfold, by other packages and by plain PyTorch, measured side by side by `make versus`, which makes its
own environment. {machine}

- Times are ratios to the first function of a row, one plain float32 network unless the row says otherwise, with the
  quartiles in brackets. The ratio is taken within a round; rounds are interleaved; the median is over {rounds} rounds
  in {processes} fresh processes.
- *Neighbour* is the fastest other package in the row; *loop* calls four plain networks one after the other.
- *Limit* is the time of the operations of all networks at the rate of large matrix products or convolutions on this
  machine, whichever is faster. No method that computes all of four networks can be below it.
- *Others* is how many cores other processes used meanwhile, at most. {clock}
- Rows that are not yet measured are left out. Each row is measured by itself, in one run of all that is compared in it.
- A step is forward, cross-entropy, backward and SGD with momentum. Batch sizes: 128 (MLP, CNN), 64 (WideResNet, ViT).
  The MLP is 784-256-256-10; the CNN has three convolutions of 32, 64 and 128 channels with batch norm.

"""


def cell(table: Mapping[str, Cell], name: str | None) -> str:
    """Return the median with quartiles of one case."""
    if name is None or name not in table:
        return "-"
    found = table[name]
    return f"{found['median']:.2f} [{found['lower']:.2f}, {found['upper']:.2f}]"


def best_neighbour(table: Mapping[str, Cell]) -> str | None:
    """Return the fastest case of another package."""
    others = [name for name in table if name not in (*OWN, *PLAIN) and not LIMITS.match(name)]
    return min((name for name in others if "plain" not in name), key=lambda name: table[name]["median"], default=None)


def limit(table: Mapping[str, Cell], precision: str) -> str:
    """Return the smaller of the two limits."""
    found = [row["median"] for name, row in table.items() if LIMITS.match(name) and name.endswith(precision)]
    return f"{min(found):.2f}" if found else "-"


def verdict(table: Mapping[str, Cell], mine: str = "enfold") -> str:
    """Return how enfold compares with the fastest other package; equal if the quartiles overlap."""
    name = best_neighbour(table)
    if name is None or mine not in table:
        return "-"
    ours, theirs = table[mine], table[name]
    if ours["upper"] < theirs["lower"]:
        return f"{theirs['median'] / ours['median']:.2f}x faster"
    if ours["lower"] > theirs["upper"]:
        return f"**{ours['median'] / theirs['median']:.2f}x slower**"
    return "equal"


def _rows(record: Mapping[str, Any], words: tuple[str, ...]) -> Iterator[str]:
    for name, row in record["rows"].items():
        if not name.startswith(words):
            continue
        table = row["table"]
        neighbour = best_neighbour(table)
        theirs = "-" if neighbour is None else f"{cell(table, neighbour)} ({neighbour})"
        loop = "plain loop" if "plain loop" in table else "plain torch"
        columns = [
            name, f"{next(iter(table.values()))['milliseconds']:.3g}", cell(table, loop), theirs, cell(table, "enfold"),
            verdict(table), cell(table, "enfold, bf16"), limit(table, "float32"), limit(table, "bf16"),
            f"{row['cores used by others']:.2f}",
        ]  # fmt: skip
        yield "| " + " | ".join(columns) + " |"


SECTIONS = {
    "MLP": ("mlp, deep", "mlp, Batch", "mlp, MC", "mlp, MIMO", "mlp, packed"),
    "CNN": ("cnn, deep", "cnn, Batch", "cnn, MC", "cnn, MIMO", "cnn, packed"),
    "WideResNet-16-2": ("wrn",),
    "ViT": ("vit",),
    "Growth with the number of members": ("mlp, deep ensemble of", "tiny mlp"),
    "A whole epoch, and distillation from four teachers": ("mlp, an epoch", "cnn, an epoch"),
    "Matching, metrics, corruptions": ("weight", "metrics", "corruption"),
}
COLUMNS = (
    "work", "first, ms", "loop", "neighbour", "enfold", "against the neighbour", "enfold, bf16", "limit", "limit, bf16",
    "others",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def _failures(record: Mapping[str, Any]) -> Iterator[str]:
    for name, row in record["rows"].items():
        for case, reason in row["failed"].items():
            yield f"- {name}: {case}: `{reason}`"


def write_page(record: Mapping[str, Any]) -> None:
    """Write the page and draw the figure from the rows that are stored."""
    about = record["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    dates = sorted({row["date"] for row in record["rows"].values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machine = (
        f"{when}, {about['cores']} cores of {about['processor']}, bf16: {about['bf16']};\n"
        f"{versions} ([all figures](../results/versus.json))."
    )
    clocks = sorted({row["clock"] for row in record["rows"].values()})
    clock = f"The clock: {' or '.join(clocks)}."
    parts = [INTRODUCTION.format(machine=machine, clock=clock, rounds=record["rounds"], processes=record["processes"])]
    parts.append("![Time of enfold relative to the fastest other package](../results/versus.svg)\n")
    if "install" in record:
        parts.append(
            "\n## Installation\n\nBeside torch and numpy; CPU seconds of the import, median and quartiles of 7.\n\n"
        )
        parts.append("| package | added packages | MB | import, s |\n|---|---|---|---|\n")
        for name, row in record["install"].items():
            span = f"{row['import seconds']:.2f} [{row['lower']:.2f}, {row['upper']:.2f}]"
            parts.append(f"| {name} | {row['packages']} | {row['megabytes']:.1f} | {span} |\n")
    for title, words in SECTIONS.items():
        rows = list(_rows(record, words))
        if title == "MLP":
            rows = [row for row in rows if "ensemble of" not in row]
        if rows:
            parts.append(f"\n## {title}\n\n{HEAD}\n" + "\n".join(rows) + "\n")
    failures = list(_failures(record))
    if failures:
        parts.append("\n## What failed\n\n" + "\n".join(failures) + "\n")
    PAGE.write_text("".join(parts), encoding="utf-8")
    draw(record)


def draw(record: Mapping[str, Any]) -> None:
    """Draw the time of enfold relative to the fastest other package in every row that has one."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    from enfold.report.figure import STYLE

    found = []
    for name, row in record["rows"].items():
        neighbour = best_neighbour(row["table"])
        if neighbour is not None and "enfold" in row["table"]:
            found.append((name, row["table"], row["table"][neighbour]["median"]))
    with plt.rc_context({**STYLE, "svg.hashsalt": "versus"}):
        figure, axes = plt.subplots(figsize=(7, 1.2 + 0.2 * len(found)), layout="constrained")
        for place, (_, table, other) in enumerate(found):
            for mine, colour in (("enfold", "#0072B2"), ("enfold, bf16", "#E69F00")):
                if mine in table:
                    ratio, low, high = (table[mine][key] / other for key in ("median", "lower", "upper"))
                    axes.plot([low, high], [place, place], color=colour, lw=2, alpha=0.4)
                    axes.plot(ratio, place, "o", ms=4, color=colour, label=mine if not place else None)
        axes.axvline(1.0, color="#999999", ls=":")
        axes.set_xscale("log")
        axes.set_yticks(range(len(found)), [name for name, _, _ in found])
        axes.invert_yaxis()
        axes.set_xlabel("time relative to the fastest other package (below 1: enfold is faster)")
        axes.legend(frameon=False)
        figure.savefig(FIGURE, metadata={"Date": None})
        plt.close(figure)
