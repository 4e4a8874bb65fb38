"""The verdicts on a paper's claims as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enfold.progress import printable

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = {  # metric -> its name, the scale to its unit, digits
    "accuracy": ("accuracy (%)", 100, 2),
    "nll": ("NLL (nats)", 1, 4),
    "brier": ("Brier", 1, 4),
    "ece": ("ECE (%)", 100, 2),
    "cnll": ("NLL, calibrated (nats)", 1, 4),
    "cbrier": ("Brier, calibrated", 1, 4),
    "cece": ("ECE, calibrated (%)", 100, 2),
    "disagreement": ("disagreement (%)", 100, 2),
    "diversity": ("diversity", 1, 3),
    "corrupted accuracy": ("accuracy, corrupted (%)", 100, 2),
    "corrupted nll": ("NLL, corrupted (nats)", 1, 3),
    "corrupted ece": ("ECE, corrupted (%)", 100, 2),
    "error": ("error (%)", 100, 2),
}
_STYLES = {"held": "green", "not held": "red", "within noise": "yellow", "not run": "dim"}

HEADER = ("claim", "metric", "published", "ours", "difference", "verdict")


def claim_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """One list of cells a claim: values of the first row / the second, the difference with its interval."""
    return [_cells(claim) for claim in content["claims"]]


def _cells(claim: Mapping[str, Any]) -> list[str]:
    metric, scale, digits = SHOWN.get(claim["metric"], (claim["metric"], 1, 4))
    sides = (claim["first"], claim["second"])

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{scale * value:.{digits}f}"

    def signed(value: float) -> str:
        return f"{scale * value:+.{digits}f}"

    def spread(ours: Mapping[str, Any] | None) -> str:
        if ours is None:
            return "-"
        mean, std = shown(ours["mean"]), ours["std"]
        return mean if std is None else f"{mean} ± {shown(std)}"

    published = " / ".join(f"{scale * side['published']:g}" if side["published"] is not None else "-" for side in sides)
    ours = " / ".join(spread(side["ours"]) for side in sides)
    found = claim["difference"]
    difference = signed(found["mean"]) if found else "-"
    if found and found["lower"] is not None:  # of one seed alone there may be no interval
        difference += f" [{signed(found['lower'])}, {signed(found['upper'])}]"
    return [claim["says"], metric, "-" if published == "- / -" else published, ours, difference, claim["verdict"]]


def claims_table(content: Mapping[str, Any]) -> Table:
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    seeds = len(content["seeds"])
    title = (
        f"{content['name']}: test data, {seeds} seed{'s' if seeds > 1 else ''}, claims of {content['source']['paper']}"
    )
    table = Table(title=Text(printable(title)), title_justify="left")
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="right" if 2 <= index <= 4 else "left", no_wrap=name == "verdict")
    for row in claim_rows(content):
        cells = [Text(printable(cell)) for cell in row]  # a claim's sentence is no markup
        cells[-1].stylize(_STYLES.get(row[-1], ""))
        table.add_row(*cells)
    return table


def claims_legend(content: Mapping[str, Any]) -> str:
    """How many claims had which verdict, and what the numbers are."""
    counted = ", ".join(f"{number} {verdict}" for verdict, number in content["verdicts"].items())
    level = f"{100 * content['bootstrap']['level']:g} %"
    return (
        f"{counted}. Values are first row / second; difference: first minus second, with the {level} interval of a "
        "bootstrap over seeds and test examples, or of Student over seeds where no predictions are compared; within "
        "noise: the interval holds 0, or there is none, as of one seed"
    )
