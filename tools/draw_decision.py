"""Draw docs/images/which-method.svg, questions that are readable at 400 pixels: python tools/draw_decision.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

FILE = Path(__file__).parent.parent / "docs" / "images" / "which-method.svg"
WIDTH, BOX, LEFT, RIGHT, LINE, GAP = 440, 196, 6, 238, 17, 22
PARTS: tuple[tuple[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]], ...] = (
    (
        "You have trained members",
        (
            (("Fine-tuned from", "one checkpoint?"), ("merge.soup,", "then distil from it")),
            (("Trained independently,", "or other architectures?"), ("distill from the", "best member")),
        ),
    ),
    (
        "You train from the start",
        (
            (("M networks affordable", "when predicting?"), ("DeepEnsemble",)),
            (("M passes, parameters", "of about one network?"), ("MixtureEnsemble,", "TreeNet, BatchEnsemble")),
            (("One pass, but M", "networks in training?"), ("DeepEnsemble,", "then compress")),
            (("One training only?",), ("SWA; for uncertainty", "SWAG, MCDropout")),
        ),
    ),
    (
        "One network must know its uncertainty",
        (
            (("Classes?",), ("distill with ProxyEnD2",)),
            (("Numbers?",), ("distill with three outputs",)),
        ),
    ),
)


def box(left: float, top: float, lines: tuple[str, ...], height: float, style: str) -> str:
    """Return a rounded box with centred lines."""
    start = top + height / 2 - (len(lines) - 1) * LINE / 2 + 5
    texts = "".join(
        f'<text x="{left + BOX / 2}" y="{start + index * LINE}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    return f'<g class="{style}"><rect x="{left}" y="{top}" width="{BOX}" height="{height}" rx="8"/>{texts}</g>'


def draw() -> str:
    """Return the diagram."""
    shapes, top = [], 8.0
    for title, rungs in PARTS:
        shapes.append(f'<text class="title" x="{LEFT}" y="{top + 16}">{escape(title)}</text>')
        top += 28
        for index, (question, answer) in enumerate(rungs):
            height = 14 + LINE * max(len(question), len(answer))
            middle = top + height / 2
            shapes += [box(LEFT, top, question, height, "question"), box(RIGHT, top, answer, height, "answer")]
            shapes.append(f'<path d="M{LEFT + BOX} {middle}H{RIGHT - 3}"/>')
            shapes.append(f'<text class="word" x="{(LEFT + BOX + RIGHT) / 2 - 2}" y="{middle - 5}">yes</text>')
            if index + 1 < len(rungs):
                shapes.append(f'<path d="M{LEFT + BOX / 2} {top + height}V{top + height + GAP - 3}"/>')
                shapes.append(f'<text class="word" x="{LEFT + BOX / 2 + 13}" y="{top + height + 14}">no</text>')
            top += height + GAP
        top += 4
    style = (
        "text{font:14px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;text-anchor:middle;fill:#1a1a1a}"
        ".title{font-weight:600;text-anchor:start}.word{font-size:11px;fill:#555}"
        ".question rect{fill:#eef1fb;stroke:#3f51b5}.answer rect{fill:#e8f5e9;stroke:#2e7d32}"
        "path{stroke:#555;fill:none;marker-end:url(#tip)}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0 0 8 4 0 8" fill="#555"/></marker>'
    )
    height = round(top - GAP + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>Which method to use</title><style>{style}</style><defs>{tip}</defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
