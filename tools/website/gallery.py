"""Tutorials: a page for each example, with its code and, where they are stored, its printed output and its figures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
TOOLS = ("quality",)
"""Files that measure and are no tutorials."""


def examples() -> list[Path]:
    """Return the files of the examples."""
    return [file for file in sorted(EXAMPLES.glob("*.py")) if file.stem not in TOOLS]


def title(file: Path) -> str:
    """Return the title of an example: its docstring up to the first colon."""
    return _document(file).partition(":")[0]


def _document(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem


def navigation() -> list[Any]:
    """Return the pages in order."""
    scripts = [{title(file): f"examples/{file.stem}.md"} for file in examples()]
    return ["examples/README.md", *scripts, {"Notebooks": [f"examples/{file.stem}.md" for file in notebooks()]}]


def notebooks() -> list[Path]:
    """Return the files of the notebooks."""
    return sorted(EXAMPLES.glob("*.ipynb"))


def notebook_page(file: Path) -> str:
    """Return the page of a notebook: its text and its code."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"[Download the notebook]({file.name})", ""])


def pages() -> dict[str, str]:
    """Return the pages of all examples."""
    scripts = {f"examples/{file.stem}.md": page(file) for file in examples()}
    return {**scripts, **{f"examples/{file.stem}.md": notebook_page(file) for file in notebooks()}}


def page(file: Path) -> str:
    """Return the page of an example."""
    text = file.read_text(encoding="utf-8")
    document = _document(file)
    code = text[text.index('"""', text.index('"""') + 3) + 3 :].strip("\n")
    heading, _, rest = document.partition(":")
    idea = rest.strip()
    lines = [f"# {heading}", "", idea[:1].upper() + idea[1:], "", f"Run it: `python examples/{file.name}`"]
    lines += [f"([download]({file.name})).", "", "```python", code, "```", ""]
    output = file.parent / "output" / f"{file.stem}.txt"
    if output.is_file():
        lines += ["It prints:", "", "```text", output.read_text(encoding="utf-8").strip("\n"), "```", ""]
    figure = file.parent / "output" / f"{file.stem}.svg"
    if figure.is_file():
        lines += [f"![{heading}](output/{figure.name})", ""]
    return "\n".join(lines)
