"""The HTML page of a study: rows, verdicts and figures in one file that loads nothing."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from studies.tables import HEADER, MARKS, claim_rows, claims_legend, count_verdicts, list_notes, make_title, table_rows


def make_page(content: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    """Return one HTML file with rows, verdicts, figures (SVG by name) and the runs they come from."""
    style = files("enfold.report").joinpath("page", "page.css").read_text(encoding="utf-8")
    header, rows = table_rows(content)
    verdict_rows = [[*row[:-1], f"{MARKS[row[-1]]} {row[-1]}"] for row in claim_rows(content)]
    drawn = "".join(
        f'<figure class="paper"><div class="scroll"><img alt="{escape(name)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg).decode()}"></div><figcaption>{escape(name)}</figcaption></figure>'
        for name, svg in figures.items()
    )
    runs = [[name, run["path"], str(run["network"]), str(run["data"])] for name, run in content["runs"].items()]
    sections = {
        "rows": ("Rows", _table(header, rows, make_title(content))),
        "claims": ("Claims", _table(HEADER, verdict_rows, claims_legend(content))),
        "figures": ("Figures", drawn),
        "runs": ("Runs", _table(("run", "folder", "network", "data"), runs, "", "facts")),
    }
    body = "".join(
        f'<section id="{key}"><h2>{name}</h2>{inner}</section>' for key, (name, inner) in sections.items() if inner
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in list_notes(content))
    return (
        '<!doctype html><html lang="en" data-theme="auto"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{escape(content['name'])}</title><style>{style}</style></head><body>"
        f'<header class="top"><p class="brand">enfold</p></header><main><section><h1>{escape(content["name"])}</h1>'
        f'<p class="lead">{escape(content["title"])}: {escape(count_verdicts(content))}</p>'
        f'<p class="intro">{escape(content["source"]["paper"])}, {escape(content["source"]["table"])}</p>'
        f'<ul class="remarks">{notes}</ul></section>{body}</main></body></html>\n'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, kind: str = "") -> str:
    heads = "".join(f'<th scope="col">{escape(each)}</th>' for each in header)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in texts)}</tr>'
        for first, *texts in rows
    )
    below = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{kind}">{below}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
