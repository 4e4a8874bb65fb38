"""Equations as MathML, which browsers show without scripts: those of docstrings, and TeX in pages."""

from __future__ import annotations

import html as text_of_html
import re
from collections import Counter

from latex2mathml.converter import convert

from website.notation import runs

NUMBER = re.compile(r"\s+\((\d+[a-z]?)\)$")
CELL = re.compile(r"\S+(?: \S+)*")
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def mathml(tex: str, display: str = "inline") -> str:
    """Return TeX as MathML, with limits below sums."""
    return convert(tex.strip(), display=display).replace("<math ", '<math displaystyle="true" ', 1)


def render_formulas(html: str) -> str:
    """Return the HTML of a page with its TeX as MathML."""
    html = INLINE.sub(lambda found: mathml(text_of_html.unescape(found[1])), html)
    return DISPLAY.sub(
        lambda found: f'<div class="formula">{mathml(text_of_html.unescape(found[1]), "block")}</div>', html
    )


def block(text: str) -> str:
    """Return an indented block of a docstring as a table: what is aligned there is aligned here.

    Pieces of a line are separated by two spaces, and a number in parentheses at its end is that of the equation.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    numbers = [found.group(1) if (found := NUMBER.search(line)) else "" for line in lines]
    cells = [[(each.start(), each.group()) for each in CELL.finditer(NUMBER.sub("", line))] for line in lines]
    often = Counter(start for line in cells for start, _ in line)
    starts = [0, *sorted(start for start, times in often.items() if times > 1)]
    cells = [_joined(line, starts) for line in cells]
    rows = [_row(line, starts, number) for line, number in zip(cells, numbers, strict=True)]
    return '<div class="equations"><table class="lines">' + "".join(rows) + "</table></div>"


def _joined(cells: list[tuple[int, str]], starts: list[int]) -> list[tuple[int, list[str]]]:
    """Return the cells of a line at the places that several lines share; others belong to the cell before them."""
    found: list[tuple[int, list[str]]] = []
    for start, text in cells:
        if not found or start in starts:
            found.append((start if start in starts else 0, [text]))
        else:
            found[-1][1].append(text)
    return found


def _row(cells: list[tuple[int, list[str]]], starts: list[int], number: str) -> str:
    places = [starts.index(start) for start, _ in cells]
    spans = [end - start for start, end in zip(places, [*places[1:], len(starts)], strict=True)]
    empty = f'<td colspan="{places[0]}"></td>' if places[0] else ""
    found = [
        f'<td colspan="{span}">{"&#8195;".join(map(_cell, texts))}</td>'
        for (_, texts), span in zip(cells, spans, strict=True)
    ]
    return f'<tr>{empty}{"".join(found)}<td class="number">{f"({number})" if number else ""}</td></tr>'


def _cell(text: str) -> str:
    parts = [run.text if run.is_prose or not run.text.strip() else f" {mathml(run.text)} " for run in runs(text)]
    return re.sub(r" +(?=[ ,;.)])", "", "".join(parts)).strip()
