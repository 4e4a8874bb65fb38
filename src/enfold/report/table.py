"""Tables: the rows of a run as a person reads them, in a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from enfold.data.corruptions.split import OURS

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]


def table_rows(summary: Mapping[str, Any], *, quartiles: bool = False) -> tuple[list[str], list[list[str]]]:
    """The header, with units, and one list of cells a model; spreads over seeds follow a ±.

    With `quartiles` those of a latency stand behind it, which is too wide for a terminal.
    """
    columns: dict[str, Callable[[Row], str]] = {
        "accuracy (%)": lambda row: _score(row, "accuracy", 100, 2),
        "NLL (nats)": lambda row: _score(row, "nll", 1, 4),
        "ECE (%)": lambda row: _score(row, "ece", 100, 2),
        "Brier": lambda row: _score(row, "brier", 1, 4),
        "gain recovered (%)": lambda row: _spread(row["gain_recovered"], 100, 0),
    }
    if any(row.get("diversity") for row in summary["rows"].values()):
        columns["diversity"] = lambda row: _spread((row.get("diversity") or {}).get("normalised_disagreement"), 1, 2)
    if any(row.get("corrupted") for row in summary["rows"].values()):
        name = corrupted_name(summary["rows"])
        columns |= {
            f"accuracy, {name} (%)": lambda row: _spread((row.get("corrupted") or {}).get("accuracy"), 100, 2),
            f"NLL, {name} (nats)": lambda row: _spread((row.get("corrupted") or {}).get("nll"), 1, 3),
            f"ECE, {name} (%)": lambda row: _spread((row.get("corrupted") or {}).get("ece"), 100, 2),
        }
    if any(row.get("cost") for row in summary["rows"].values()):
        columns |= {
            "parameters": lambda row: _cost(row, lambda cost: f"{cost['parameters']:,}"),
            "MFLOPs": lambda row: _cost(row, lambda cost: f"{cost['flops'] / 1e6:.2f}"),
            "latency, 1 (ms)": lambda row: _cost(row, lambda cost: _latency(cost, "1", quartiles)),
            "latency, 128 (ms)": lambda row: _cost(row, lambda cost: _latency(cost, "128", quartiles)),
        }
    rows = [[marked(name, row), *(cell(row) for cell in columns.values())] for name, row in summary["rows"].items()]
    return ["model", *columns], rows


def marked(name: str, row: Row) -> str:
    """The name of a row, with a mark if its training returned its start."""
    if not row.get("unchanged"):
        return name
    unchanged, seeds = len(row["unchanged"]), len(row["scores"]["nll"]["values"])
    return f"{name} (unchanged)" if unchanged == seeds else f"{name} (unchanged in {unchanged} of {seeds} seeds)"


def corrupted_name(rows: Mapping[str, Row]) -> str:
    """What scores on corrupted images are called: "CIFAR-10-C" for the official ones, "corrupted" for enfold's own."""
    return next((row["corrupted"]["source"] for row in rows.values() if "source" in (row.get("corrupted") or {})), OURS)


def _score(row: Row, name: str, scale: float, digits: int) -> str:
    return _spread(row["scores"][name], scale, digits)


def _spread(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    if value is None:
        return "-"
    text = f"{scale * value['mean']:.{digits}f}"
    return text if value["std"] is None else f"{text} ± {scale * value['std']:.{digits}f}"


def _cost(row: Row, show: Callable[[Mapping[str, Any]], str]) -> str:
    return show(row["cost"]) if row.get("cost") else "-"


def _latency(cost: Mapping[str, Any], batch: str, quartiles: bool) -> str:
    seconds = cost["latency"][batch]
    spread = f" [{1e3 * seconds['lower']:.2f}, {1e3 * seconds['upper']:.2f}]" if quartiles else ""
    return f"{1e3 * seconds['median']:.2f}{spread} ({cost['ratios']['latency'][batch]:.2f}x)"


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """For a terminal."""
    from rich.table import Table

    header, rows = table_rows(summary)
    seeds = summary["seeds"]
    title = f"{summary['name']}: test data, " + ("1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds, mean ± std")
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(summary: Mapping[str, Any]) -> str:
    """For a file."""
    header, rows = table_rows(summary, quartiles=True)
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What the names of rows do not say: whose control a control is, and which ensemble a fold of some is held to."""
    found = []
    folds = [fold for fold in summary.get("recipe", {}).get("folds", ()) if fold["label"] in summary["rows"]]
    of = summary.get("controls", {})
    for control in dict.fromkeys(of[fold["label"]] for fold in folds if fold["label"] in of):
        own = [fold["label"] for fold in folds if of.get(fold["label"]) == control]
        found.append(f"{control}: the best member, trained on as long as {', '.join(own)}")
    for first in dict.fromkeys(fold["first"] for fold in folds if fold.get("first")):
        few = [fold["label"] for fold in folds if fold.get("first") == first]
        row = f"ensemble of {first}"
        beside = f"the row {row}" if row in summary["rows"] else "which has no row"
        found.append(
            f"{', '.join(few)}: folded from the first {first} members, and the gain is that of their ensemble, {beside}"
        )
    for name, row in summary["rows"].items():
        if row.get("unchanged"):
            starts = ", ".join(dict.fromkeys(row["unchanged"]))
            found.append(f"{marked(name, row)}: no epoch had a lower validation NLL than its start, {starts}")
    return found


LEGEND = (
    "diversity: how often two members disagree, over the error of one; "
    "gain recovered: how much of the ensemble's gain in NLL over its mean member one network keeps; "
    "latency: median of one call at batch 1 and 128, its quartiles in square brackets (in table.md), "
    "in round ones the ratio to one network, taken round by round"
)
