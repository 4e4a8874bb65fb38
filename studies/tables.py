"""Tables of a study: our rows beside the published ones and the verdict of every claim, for a terminal and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enfold.progress import printable

if TYPE_CHECKING:
    from rich.table import Table

METRICS = {  # metric: heading, factor to its unit, digits
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
MARKS = {"held": "✓", "not held": "✗", "within noise": "≈", "not run": "–"}
STYLES = {"held": "green", "not held": "red", "within noise": "yellow", "not run": "dim"}
HEADER = ("claim", "metric", "published", "ours", "difference", "verdict")


def claim_rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the text of each claim: values of the first / the second row, and the difference with its interval."""
    return [_claim_row(claim) for claim in content["claims"]]


def _claim_row(claim: Mapping[str, Any]) -> list[str]:
    metric, scale, digits = METRICS.get(claim["metric"], (claim["metric"], 1, 4))
    sides = (claim["first"], claim["second"])

    def number(value: float | None) -> str:
        return "-" if value is None else f"{scale * value:.{digits}f}"

    def signed(value: float) -> str:
        return f"{scale * value:+.{digits}f}"

    def spread(ours: Mapping[str, Any] | None) -> str:
        if ours is None:
            return "-"
        mean, std = number(ours["mean"]), ours["std"]
        return mean if std is None else f"{mean} ± {number(std)}"

    published = " / ".join(f"{scale * side['published']:g}" if side["published"] is not None else "-" for side in sides)
    ours = " / ".join(spread(side["ours"]) for side in sides)
    values = claim["difference"]
    difference = signed(values["mean"]) if values else "-"
    if values and values["lower"] is not None:  # one seed may have no interval
        difference += f" [{signed(values['lower'])}, {signed(values['upper'])}]"
    return [claim["statement"], metric, "-" if published == "- / -" else published, ours, difference, claim["verdict"]]


def claims_table(content: Mapping[str, Any]) -> Table:
    """Return the table of claims for a terminal."""
    from rich.table import Table
    from rich.text import Text

    seeds = len(content["seeds"])
    heading = f"{content['name']}: claims of {content['source']['paper']}, test data, {seeds} seed{'s' * (seeds > 1)}"
    table = Table(title=Text(printable(heading)), title_justify="left")
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="right" if 2 <= index <= 4 else "left", no_wrap=name == "verdict")
    for row in claim_rows(content):
        texts = [Text(printable(text)) for text in row]  # a statement is not markup
        texts[-1].stylize(STYLES.get(row[-1], ""))
        table.add_row(*texts)
    return table


def claims_legend(content: Mapping[str, Any]) -> str:
    """Return the number of claims by verdict, and the meaning of the columns."""
    counts = ", ".join(f"{number} {verdict}" for verdict, number in content["verdicts"].items())
    level = f"{100 * content['bootstrap']['level']:g} %"
    corrected = count_published(content)
    return (
        f"{counts}. {corrected}Values: first row / second row. Difference: first minus second, with its {level} "
        "interval over seeds and test examples, or over seeds for numbers that are not computed from predictions. "
        "Within noise: the interval contains 0, or one seed gives no interval"
    )


def count_published(content: Mapping[str, Any]) -> str:
    """Return the verdicts of the paper's claims, plain and by Holm's method; nothing for results without it."""
    if "published_verdicts" not in content:
        return ""
    plain, corrected = (
        ", ".join(f"{number} {verdict}" for verdict, number in content[key].items() if number)
        for key in ("published_verdicts", "published_verdicts_holm")
    )
    return f"Of the paper's claims {plain}; with Holm's correction {corrected}. "


def table_rows(content: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the text of each row: ours, with the published value in brackets."""
    metrics = list(dict.fromkeys(metric for row in content["rows"] for metric in row["metrics"]))
    several = len(content["runs"]) > 1
    header = [*(["run"] if several else []), "row", *(METRICS.get(metric, (metric,))[0] for metric in metrics)]
    rows = []
    for row in content["rows"]:
        name = row["row"].removeprefix(f"{row['run']}/")
        texts = (
            format_pair(row["metrics"].get(metric), *METRICS.get(metric, (metric, 1, 3))[1:]) for metric in metrics
        )
        rows.append([*([row["run"]] if several else []), name, *texts])
    return header, rows


def format_pair(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    """Return our mean and standard deviation over seeds, with the published value in brackets."""
    if value is None:
        return "-"
    ours, published = value["ours"], value["published"]
    text = "-"
    if ours is not None:
        text = f"{scale * ours['mean']:.{digits}f}"
        text += "" if ours["std"] is None else f" ± {scale * ours['std']:.{digits}f}"
    return text if published is None else f"{text} ({round(scale * published, 4):g})"


def rows_table(content: Mapping[str, Any]) -> Table:
    """Return the table of rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    header, rows = table_rows(content)
    table = Table(title=Text(printable(make_title(content))), title_justify="left")
    names = header.index("row") + 1
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < names else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(text)) for text in row))
    return table


def make_title(content: Mapping[str, Any]) -> str:
    """Return the caption of the rows."""
    seeds = len(content["seeds"])
    spread = "1 seed" if seeds == 1 else f"{seeds} seeds, mean ± std"
    return f"{content['title']}: test data, {content['scale']} scale, {spread}; published values in brackets"


def list_notes(content: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know to interpret the numbers."""
    notes = [f"Claims about {run} are evaluated on {other}." for run, other in content["substitutes"].items()]
    for run, (published, used) in content.get("other_data", {}).items():
        of_run = f" of {run}" if len(content["runs"]) > 1 else ""
        notes.append(f"The data set{of_run} was changed: ours is {used}, the published values are for {published}.")
    if content["scale"] == "smoke":
        notes.append("The smoke scale only shows that everything runs; its numbers are not evidence for the claims.")
    elif content["scale"] == "laptop":
        notes.append("Networks and training sets are smaller than the published ones: compare orderings, not values.")
    if content.get("regime"):
        accuracies = [f"{100 * each:.1f}" for of_run in content["training_accuracy"].values() for each in of_run]
        notes.append(f"{content['regime']} Accuracy of the members on training images: {', '.join(accuracies)} %.")
        minutes = sum(content["training_seconds"].values()) / 60
        notes.append(f"`{content['command']}`; all trainings of the run took {minutes:.0f} minutes.")
        counts = {row["row"]: count_seeds(row) for row in content.get("rows", ())}
        fewer = [f"{name} ({count})" for name, count in counts.items() if count < len(content["seeds"])]
        if len(fewer) == len(counts) > 1 and len(set(counts.values())) == 1:
            notes.append(f"All rows have {next(iter(counts.values()))} of {len(content['seeds'])} seeds.")
        elif fewer:
            notes.append(f"Fewer than {len(content['seeds'])} seeds: {', '.join(fewer)}.")
        if 1 in counts.values():
            notes.append("Intervals of one seed are those of the test set.")
    if content.get("only"):
        notes.append(f"Only these runs: {', '.join(content['only'])}.")
    if content["changes"]:
        notes.append(f"Changes: {', '.join(content['changes'])}.")
    return notes


def count_seeds(row: Mapping[str, Any]) -> int:
    """Return the smallest number of seeds of the row's metrics."""
    counts = [len(value["ours"]["values"]) for value in row["metrics"].values() if value["ours"] is not None]
    return min(counts, default=0)


def count_verdicts(content: Mapping[str, Any]) -> str:
    """Return the number of claims for each verdict that occurs."""
    return ", ".join(f"{number} {verdict}" for verdict, number in content["verdicts"].items() if number)


def rows_csv(content: Mapping[str, Any]) -> str:
    """Return one line for each row and metric, as numbers without units."""
    header = ("run", "row", "label", "metric", "published", "ours", "std", "seeds")
    lines = []
    for row in content["rows"]:
        for metric, value in row["metrics"].items():
            ours = value["ours"] or {"mean": None, "std": None, "values": []}
            numbers = (value["published"], ours["mean"], ours["std"], len(ours["values"]))
            lines.append((row["run"], row["row"], row["label"], metric, *numbers))
    return _csv(header, lines)


def claims_csv(content: Mapping[str, Any]) -> str:
    """Return one line for each claim, as numbers without units."""
    header = ("claim", "source", "metric", "first", "relation", "second", "difference", "lower", "upper", "verdict")
    lines = []
    for claim in content["claims"]:
        values = claim["difference"] or {"mean": None, "lower": None, "upper": None}
        sides = (claim["first"]["row"], claim["relation"], claim["second"]["row"])
        numbers = (values["mean"], values["lower"], values["upper"])
        lines.append((claim["statement"], claim["source"], claim["metric"], *sides, *numbers, claim["verdict"]))
    return _csv(header, lines)


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *lines])
    return text.getvalue()


def listing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return all tables and figures with the time and the data that each scale needs."""
    from rich.table import Table

    scales = list(rows[0]["scales"])
    table = Table("name", "table", *scales, show_lines=True)
    for row in rows:
        needs = []
        for scale in scales:
            of_scale = row["scales"][scale]
            data = [f"{name}: {'present' if there else 'missing'}" for name, there in of_scale["data"].items()]
            needs.append("\n".join([of_scale["time"], *data]))
        table.add_row(row["name"], f"{row['title']}\n{row['paper']}", *needs)
    return table
