"""Tables of a run's results for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from enfold.data.corruptions.split import OURS
from enfold.report.metric_columns import TITLES, criterion_of, has_class_rows, metric_title, shown_metrics
from enfold.train.history import describe_unchanged

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]
REFERENCE = "mean member"
WITHIN_NOISE = "within noise"
LOWEST, HIGHEST = -1.0, 5.0  # gains recovered beyond these say only that a network failed, or that the gain is small


def table_rows(summary: Mapping[str, Any], *, quartiles: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the header, with units, and one list of cells per model.

    Args:
        summary: The results of a run, as in `summary.json`.
        quartiles: Whether latencies include their quartiles, which is too wide for a terminal.

    Returns:
        The names of the columns, and the cells; standard deviations over seeds follow a ±.
    """
    rows = summary["rows"]
    columns = {TITLES[metric][0]: _score_cells(rows, metric) for metric in shown_metrics(rows)}
    columns["gain recovered (%)"] = lambda name: format_gain(summary, name).removesuffix(" %")
    if any("normalised_disagreement" in (row.get("diversity") or {}) for row in rows.values()):
        columns["diversity"] = lambda name: format_spread(
            (rows[name].get("diversity") or {}).get("normalised_disagreement"), 1, 2
        )
    if any(row.get("corrupted") for row in rows.values()):
        title = corrupted_name(rows)
        columns |= {
            f"accuracy, {title} (%)": lambda name: format_spread(_corrupted_scores(rows[name], "accuracy"), 100, 2),
            f"NLL, {title} (nats)": lambda name: format_spread(_corrupted_scores(rows[name], "nll"), 1, 3),
            f"ECE, {title} (%)": lambda name: format_spread(_corrupted_scores(rows[name], "ece"), 100, 2),
        }
    if any(row.get("cost") for row in rows.values()):
        columns |= {
            "parameters": lambda name: _cost(rows[name], lambda cost: f"{cost['parameters']:,}"),
            "MFLOPs": lambda name: _cost(rows[name], lambda cost: f"{cost['flops'] / 1e6:.2f}"),
            "latency, 1 (ms)": lambda name: _cost(rows[name], lambda cost: format_latency(cost, "1", quartiles)),
            "latency, 128 (ms)": lambda name: _cost(rows[name], lambda cost: format_latency(cost, "128", quartiles)),
        }
    cells = [[row_title(name, row), *(cell(name) for cell in columns.values())] for name, row in rows.items()]
    return ["model", *columns], cells


def _score_cells(rows: Mapping[str, Row], metric: str) -> Callable[[str], str]:
    _, scale, digits = TITLES[metric]
    return lambda name: format_spread(rows[name]["scores"].get(metric), scale, digits)


def recipe_steps(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps of the run's recipe in their order."""
    recipe = summary.get("recipe", {})
    return [step for name in ("steps", "shares", "folds") for step in recipe.get(name, ())]


def row_title(name: str, row: Row) -> str:
    """Return the name of a row, marked where training returned the weights that it started from."""
    if not row.get("unchanged"):
        return name
    unchanged, seeds = len(row["unchanged"]), len(next(iter(row["scores"].values()))["values"])
    return f"{name} (unchanged)" if unchanged == seeds else f"{name} (unchanged in {unchanged} of {seeds} seeds)"


def corrupted_name(rows: Mapping[str, Row]) -> str:
    """Return "CIFAR-10-C" (or similar) for the official corrupted images, "corrupted" for those that enfold makes."""
    return next((row["corrupted"]["source"] for row in rows.values() if "source" in (row.get("corrupted") or {})), OURS)


def format_spread(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    """Return mean ± standard deviation, or "-" without a value."""
    if not value:
        return "-"
    text = f"{scale * value['mean']:.{digits}f}"
    return text if value["std"] is None else f"{text} ± {scale * value['std']:.{digits}f}"


def is_gain_noise(summary: Mapping[str, Any], name: str) -> bool:
    """Return whether the gain of the ensemble, by which the gain recovered of a row is divided, is within noise.

    With several seeds the gain is within noise if its mean is not above twice its standard error; with one seed if its
    stored bootstrap interval (`gain_interval` of the ensemble's row) contains 0. Without either it is unknown,
    and the function returns False.
    """
    if name == REFERENCE:
        return False
    rows = summary["rows"]
    first = next((step.get("first") for step in recipe_steps(summary) if step.get("label") == name), None)
    ensemble = rows.get(f"ensemble of {first}" if first else "ensemble") or rows.get("ensemble")
    if ensemble is None or REFERENCE not in rows:
        return False
    criterion = criterion_of(rows)
    values = (row["scores"][criterion]["values"] for row in (rows[REFERENCE], ensemble))
    pairs = zip(*values, strict=False)
    gains = [single - several for single, several in pairs if math.isfinite(single) and math.isfinite(several)]
    if len(gains) > 1:
        return bool(fmean(gains) <= 2 * stdev(gains) / math.sqrt(len(gains)))
    low, high = ensemble.get("gain_interval") or (-1.0, -1.0)
    return low <= 0 <= high


def format_gain(summary: Mapping[str, Any], name: str) -> str:
    """Return the gain recovered of a row in per cent with its standard deviation over seeds.

    Returns:
        "within noise" where the gain of the ensemble is; "< -100 %" for networks that are far worse than a member (a
        ratio to a small gain says no more); "-" without a value. JSON files contain the number in every case.
    """
    value = summary["rows"].get(name, {}).get("gain_recovered")
    if value is None:
        return "-"
    if is_gain_noise(summary, name):
        return WITHIN_NOISE
    if value["mean"] < LOWEST or value["mean"] > HIGHEST:
        return f"< {100 * LOWEST:.0f} %" if value["mean"] < LOWEST else f"> {100 * HIGHEST:.0f} %"
    return f"{format_spread(value, 100, 0)} %"


def _corrupted_scores(row: Row, metric: str) -> Mapping[str, Any] | None:
    return (row.get("corrupted") or {}).get(metric)


def _cost(row: Row, show: Callable[[Mapping[str, Any]], str]) -> str:
    return show(row["cost"]) if row.get("cost") else "-"


def format_latency(cost: Mapping[str, Any], batch: str, quartiles: bool) -> str:
    """Return the median in ms and its ratio to one network, or "equal" where the quartiles of both overlap."""
    own, reference = cost["latency"][batch], cost.get("reference", {}).get("latency", {}).get(batch)
    spread = f" [{1e3 * own['lower']:.2f}, {1e3 * own['upper']:.2f}]" if quartiles else ""
    if own == reference:  # the single network itself
        return f"{1e3 * own['median']:.2f}{spread}"
    equal = reference is not None and own["lower"] <= reference["upper"] and reference["lower"] <= own["upper"]
    ratio = "equal" if equal else f"{cost['ratios']['latency'][batch]:.2f}x"
    return f"{1e3 * own['median']:.2f}{spread} ({ratio})"


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """Return the table for a terminal."""
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
    """Return the table as Markdown, with the quartiles of latencies."""
    header, rows = table_rows(summary, quartiles=True)
    return format_markdown([header, ["---", *("---:" for _ in header[1:])], *rows]) + "\n"


def format_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return cells, the line below the header among them, as a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return notes on rows: what a control is compared with, which ensemble a gain refers to, unchanged networks."""
    found = []
    loss = metric_title(criterion_of(summary["rows"]))
    steps = [step for step in recipe_steps(summary) if step["label"] in summary["rows"]]
    controls = summary.get("controls", {})
    for control in dict.fromkeys(controls[step["label"]] for step in steps if step["label"] in controls):
        own = [step["label"] for step in steps if controls.get(step["label"]) == control]
        found.append(f"{control}: the best member, trained further on labels for as many epochs as {', '.join(own)}")
    for first in dict.fromkeys(step["first"] for step in steps if step.get("first")):
        labels = [step["label"] for step in steps if step.get("first") == first]
        row = f"ensemble of {first}"
        reference = f"the row {row}" if row in summary["rows"] else "which has no row"
        found.append(
            f"{', '.join(labels)}: made from the first {first} members; the gain is that of their ensemble, {reference}"
        )
    for name, row in summary["rows"].items():
        if row.get("unchanged"):
            starts = ", ".join(dict.fromkeys(row["unchanged"]))
            found.append(describe_unchanged(row_title(name, row), starts, loss))
    if any(is_gain_noise(summary, name) for name in summary["rows"]):
        found.append(f"{WITHIN_NOISE}: the ensemble's own gain in {loss} is, so a fraction of it has no meaning")
    return found


def legend(summary: Mapping[str, Any]) -> str:
    """Return the explanation of the columns."""
    diversity = "diversity: disagreement of two members divided by the error rate of one; "
    rows = summary["rows"]
    return (
        f"{diversity if has_class_rows(rows) else ''}"
        f"gain recovered: fraction of the ensemble's gain in {metric_title(criterion_of(rows))} over its mean member; "
        "latency: median of one call at batch size 1 and 128, with quartiles in square brackets in table.md; "
        "in parentheses the ratio to a single network, or equal where the quartiles of both overlap"
    )
