"""Tutorials: a page for each example, with its code and, where they are stored, its printed output and its figures."""

from __future__ import annotations

import ast
import json
from html import escape
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTPUT = EXAMPLES / "output"
"""What `make gallery` stores."""
QUOTES = '"""'
TOOLS = ("quality",)
"""Files that measure and are no tutorials."""


def examples() -> list[Path]:
    """Return the files of the examples."""
    return [file for file in sorted(EXAMPLES.glob("*.py")) if file.stem not in TOOLS]


def _document(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem


def _cells(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return found


def navigation() -> list[Any]:
    """Return the pages in order."""
    scripts = [{title(file): f"examples/{file.stem}.md"} for file in examples()]
    return ["examples/README.md", *scripts, {"Notebooks": [f"examples/{file.stem}.md" for file in notebooks()]}]


def notebooks() -> list[Path]:
    """Return the files of the notebooks."""
    return sorted(EXAMPLES.glob("*.ipynb"))


def pages() -> dict[str, str]:
    """Return the pages of all examples."""
    scripts = {f"examples/{file.stem}.md": page(file) for file in examples()}
    return {**scripts, **{f"examples/{file.stem}.md": notebook_page(file) for file in notebooks()}}


def page(file: Path) -> str:
    """Return the page of an example: its idea, its figures, what it prints, and its code."""
    text = file.read_text(encoding="utf-8")
    code = text[text.index(QUOTES, text.index(QUOTES) + 3) + 3 :].strip("\n")
    about = _document(file).partition(":")[2].strip()
    lines = [f"# {title(file)}", "", about[:1].upper() + about[1:], "", f"Run it: `python examples/{file.name}`"]
    lines += [f"([download]({file.name})).", "", *(line for each in figures(file) for line in (_image(file, each), ""))]
    output = OUTPUT / f"{file.stem}.txt"
    if output.is_file():
        lines += ["It prints:", "", "```text", output.read_text(encoding="utf-8").strip("\n"), "```", ""]
    return "\n".join([*lines, "```python", code, "```", ""])


def notebook_page(file: Path) -> str:
    """Return the page of a notebook: its text and code, with the stored results of each cell."""
    stored = OUTPUT / f"{file.stem}.json"
    cells = _cells(file)
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else [[]] * len(cells)
    parts = []
    for cell, found in zip(cells, results, strict=True):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_result(file, each) for each in found]
    return "\n\n".join([*parts, f"[Download the notebook]({file.name})", ""])


def _result(file: Path, found: dict[str, str]) -> str:
    """Return a result of a cell: a figure, a table or a text."""
    if "figure" in found:
        return _image(file, OUTPUT / found["figure"])
    if "html" in found:
        return f'<div class="cell-output">{found["html"]}</div>'
    return f"```text\n{found['text'].strip()}\n```"


def figures(file: Path) -> list[Path]:
    """Return the stored figures of an example, those that it draws itself first."""
    own = [each for each in OUTPUT.glob(f"{file.stem}-*.png") if each.stem.removeprefix(f"{file.stem}-").isdigit()]
    return [*sorted(own), *OUTPUT.glob(f"{file.stem}.png")]


def _image(file: Path, figure: Path) -> str:
    return f"![{title(file)}: figure](output/{figure.name})"


def title(file: Path) -> str:
    """Return the title of an example: its docstring up to the first colon, or the heading of a notebook."""
    if file.suffix == ".ipynb":
        return "".join(_cells(file)[0]["source"]).splitlines()[0].removeprefix("# ")
    return _document(file).partition(":")[0]


def idea(file: Path) -> str:
    """Return one sentence about an example."""
    if file.suffix == ".ipynb":
        text = "".join(_cells(file)[0]["source"]).split("\n\n")[1]
        return " ".join(text.split()).split(". ")[0].rstrip(".") + "."
    text = " ".join(_document(file).partition(":")[2].split("\n\n")[0].split())
    return text[:1].upper() + text[1:]


def overview(markdown: str) -> str:
    """Return the page of all examples: its text, and a card with the first figure of each example."""
    cards = []
    for file in [*examples(), *notebooks()]:
        shown = [f'<img src="output/{each.name}" alt="">' for each in figures(file)[:1]]
        words = f"<strong>{escape(title(file))}</strong><span>{escape(idea(file))}</span>"
        cards.append(f'<a class="card" href="{file.stem}.html">{"".join(shown)}{words}</a>')
    return f'{markdown}\n<div class="gallery">{"".join(cards)}</div>\n'
