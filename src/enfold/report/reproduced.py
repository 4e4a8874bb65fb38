"""A table reproduced: our rows beside the published ones, and verdicts, in a terminal, as CSV and as one HTML page."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from enfold.progress import printable
from enfold.report.claims import HEADER, SHOWN, claim_rows, claims_legend

if TYPE_CHECKING:
    from rich.table import Table

MARKS = {"held": "✓", "not held": "✗", "within noise": "≈", "not run": "–"}


def row_cells(content: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and one list of cells a row: ours, with what is published in brackets."""
    metrics = list(dict.fromkeys(metric for row in content["rows"] for metric in row["metrics"]))
    several = len(content["runs"]) > 1
    header = [*(["run"] if several else []), "row", *(SHOWN.get(metric, (metric,))[0] for metric in metrics)]
    cells = []
    for row in content["rows"]:
        name = row["row"].removeprefix(f"{row['run']}/")
        told = (both(row["metrics"].get(metric), *SHOWN.get(metric, (metric, 1, 3))[1:]) for metric in metrics)
        cells.append([*([row["run"]] if several else []), name, *told])
    return header, cells


def both(found: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    """Ours, mean and deviation over seeds, with what is published in brackets."""
    if found is None:
        return "-"
    ours, published = found["ours"], found["published"]
    text = "-"
    if ours is not None:
        text = f"{scale * ours['mean']:.{digits}f}"
        text += "" if ours["std"] is None else f" ± {scale * ours['std']:.{digits}f}"
    return text if published is None else f"{text} ({round(scale * published, 4):g})"


def rows_table(content: Mapping[str, Any]) -> Table:
    """Our rows beside the published ones, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    header, rows = row_cells(content)
    table = Table(title=Text(printable(title(content))), title_justify="left")
    named = header.index("row") + 1
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < named else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def title(content: Mapping[str, Any]) -> str:
    """What was reproduced, and how."""
    seeds = len(content["seeds"])
    spread = "1 seed" if seeds == 1 else f"{seeds} seeds, mean ± std"
    return f"{content['title']}: test data at the scale {content['scale']}, {spread}; what is published in brackets"


def notes(content: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers."""
    said = [f"What is said of {run} is held against {other}." for run, other in content["instead"].items()]
    for run, (meant, taken) in content.get("other_data", {}).items():
        of_run = f" of {run}" if len(content["runs"]) > 1 else ""
        said.append(f"The data set{of_run} was changed: ours is {taken}, what is published is of {meant}.")
    if content["scale"] == "smoke":
        said.append("The smoke scale shows that everything runs; its numbers say nothing about the claims.")
    elif content["scale"] == "laptop":
        said.append("The networks are smaller and see less data than those published: compare orders, not values.")
    if content.get("only"):
        said.append(f"Only {', '.join(content['only'])} of its runs.")
    if content["changes"]:
        said.append(f"Changed: {', '.join(content['changes'])}.")
    return said


def verdicts(content: Mapping[str, Any]) -> str:
    """How many claims had which verdict."""
    return ", ".join(f"{number} {verdict}" for verdict, number in content["verdicts"].items() if number)


def rows_csv(content: Mapping[str, Any]) -> str:
    """One line a row and metric, in plain numbers."""
    header = ("run", "row", "label", "metric", "published", "ours", "std", "seeds")
    lines = []
    for row in content["rows"]:
        for metric, found in row["metrics"].items():
            ours = found["ours"] or {"mean": None, "std": None, "values": []}
            numbers = (found["published"], ours["mean"], ours["std"], len(ours["values"]))
            lines.append((row["run"], row["row"], row["label"], metric, *numbers))
    return _csv(header, lines)


def claims_csv(content: Mapping[str, Any]) -> str:
    """One line a claim, in plain numbers."""
    header = ("claim", "source", "metric", "first", "relation", "second", "difference", "lower", "upper", "verdict")
    lines = []
    for claim in content["claims"]:
        found = claim["difference"] or {"mean": None, "lower": None, "upper": None}
        sides = (claim["first"]["row"], claim["relation"], claim["second"]["row"])
        numbers = (found["mean"], found["lower"], found["upper"])
        lines.append((claim["says"], claim["source"], claim["metric"], *sides, *numbers, claim["verdict"]))
    return _csv(header, lines)


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([header, *lines])
    return written.getvalue()


def page(content: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    """One HTML file that loads nothing: rows, verdicts, figures (SVG by name) and how it was made."""
    style = files("enfold.report").joinpath("page", "page.css").read_text(encoding="utf-8")
    header, rows = row_cells(content)
    verdict_rows = [[*row[:-1], f"{MARKS[row[-1]]} {row[-1]}"] for row in claim_rows(content)]
    drawn = "".join(
        f'<figure class="paper"><div class="scroll"><img alt="{escape(name)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg).decode()}"></div><figcaption>{escape(name)}</figcaption></figure>'
        for name, svg in figures.items()
    )
    made = [[name, run["path"], str(run["network"]), str(run["data"])] for name, run in content["runs"].items()]
    sections = {
        "rows": ("Rows", _table(header, rows, title(content))),
        "claims": ("Claims", _table(HEADER, verdict_rows, claims_legend(content))),
        "figures": ("Figures", drawn),
        "made": ("How it was made", _table(("run", "folder", "network", "data"), made, "", "facts")),
    }
    body = "".join(
        f'<section id="{key}"><h2>{name}</h2>{inner}</section>' for key, (name, inner) in sections.items() if inner
    )
    told = "".join(f"<li>{escape(note)}</li>" for note in notes(content))
    return (
        '<!doctype html><html lang="en" data-theme="auto"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{escape(content['name'])}</title><style>{style}</style></head><body>"
        f'<header class="top"><p class="brand">enfold</p></header><main><section><h1>{escape(content["name"])}</h1>'
        f'<p class="lead">{escape(content["title"])}: {escape(verdicts(content))}</p>'
        f'<p class="intro">{escape(content["source"]["paper"])}, {escape(content["source"]["table"])}</p>'
        f'<ul class="remarks">{told}</ul></section>{body}</main></body></html>\n'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, kind: str = "") -> str:
    named = "".join(f'<th scope="col">{escape(each)}</th>' for each in header)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    below = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{kind}">{below}<thead><tr>{named}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def listing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What can be reproduced, and what it needs at each scale."""
    from rich.table import Table

    scales = list(rows[0]["scales"])
    table = Table("name", "what", *scales, show_lines=True)
    for row in rows:
        needs = []
        for scale in scales:
            found = row["scales"][scale]
            here = [f"{name}: {'here' if present else 'not here'}" for name, present in found["data"].items()]
            needs.append("\n".join([found["takes"], *here]))
        table.add_row(row["name"], f"{row['title']}\n{row['paper']}", *needs)
    return table
