"""A page for each method: idea, equations, arguments, reference and measured results, from its file and records."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from enfold.registry import PACKAGES, Method, methods, use_of
from website import equations, measured

KINDS = {
    "ensemble": ("Ensembles", "ensembles"),
    "distill": ("Distillation losses", "distillation"),
    "perturb": ("Perturbations of inputs", "perturbations"),
    "merge": ("Merges", "merges"),
}
"""Titles and folders of the kinds."""

LINK = re.compile(r"\]\(((?:\.\./)*(?:docs/)?)methods\.md#(\w+)\)")
ARXIV = re.compile(r"arXiv[: ]\s*(\d{4}\.\d{4,5})")
OPENREVIEW = re.compile(r"(?<![/\w])openreview\.net/\S+?(?=[.,;]?(?:\s|$))")


def page_of(method: Method) -> str:
    """Return the place of the page of a method, without .md, in docs/methods."""
    return f"{KINDS[method.kind][1]}/{method.name}"


@cache
def pages_by_target() -> dict[str, str]:
    """Return the page of each class or function that is a method."""
    return {
        f"{method.target.__module__}.{method.target.__qualname__}": page_of(method)
        for kind in PACKAGES
        for method in methods(kind).values()
    }


def title(method: Method) -> str:
    """Return the name of the class or function."""
    return str(method.target.__name__)


def navigation() -> list[Any]:
    """Return the pages in order, by kind."""
    parts: list[Any] = [{"All methods": "docs/methods.md"}]
    for kind, (heading, _) in KINDS.items():
        parts.append({heading: [{title(each): f"docs/methods/{page_of(each)}.md"} for each in methods(kind).values()]})
    return parts


def pages() -> dict[str, str]:
    """Return the pages of all methods."""
    return {f"docs/methods/{page_of(method)}.md": page(method) for kind in KINDS for method in methods(kind).values()}


def overview(markdown: str) -> str:
    """Return docs/methods.md for the site: without the options of methods, which are on their pages."""
    tables = re.split(r"^### ", markdown, maxsplit=1, flags=re.MULTILINE)[0]
    return tables.replace("](#", "](methods.md#")


def link_pages(markdown: str) -> str:
    """Return a page whose links to a method in docs/methods.md lead to the page of the method."""
    places = {method.name: page_of(method) for kind in KINDS for method in methods(kind).values()}
    return LINK.sub(
        lambda found: f"]({found[1]}methods/{places[found[2]]}.md)" if found[2] in places else found[0], markdown
    )


@cache
def when_to_use() -> dict[str, str]:
    """Return when to use each method, by name."""
    found: dict[str, str] = yaml.safe_load((Path(__file__).parent / "when.yaml").read_text(encoding="utf-8"))
    return found


def page(method: Method) -> str:
    """Return the page of a method."""
    text = inspect.cleandoc(sys.modules[method.target.__module__].__doc__ or "")
    paragraphs = re.split(r"\n\s*\n", text)[1:]
    module = "enfold.merge" if method.kind == "merge" else "enfold"
    literal = use_of(method, "`")
    lines = [f"# {title(method)}", "", sentence(method.idea), "", f"Python: `{module}.{title(method)}`. "]
    lines[-1] += f"Command line and recipes: {literal}."
    if method.name in when_to_use():
        lines += ["", "## When to use it", "", when_to_use()[method.name]]
    if body := [each for each in paragraphs if not each.startswith("Differs from")]:
        lines += ["", "## Method", "", *(part for each in body for part in (paragraph(each), ""))]
    if differs := [each for each in paragraphs if each.startswith("Differs from")]:
        lines += ["## Differences from the paper", "", *(part for each in differs for part in (_difference(each), ""))]
    lines += ["## Measured", "", measured.section(method), ""]
    target = f"{method.target.__module__}.{method.target.__qualname__}"
    options = ["    options:", "      heading_level: 2", "      members: false", "      show_bases: false"]
    lines += [f"::: {target}", *options, ""]
    return "\n".join(lines)


def paragraph(text: str) -> str:
    """Return a paragraph of a docstring as Markdown: its indented lines are equations, the others prose."""
    parts: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        is_equation = line.startswith("    ")
        if not parts or parts[-1][0] != is_equation:
            parts.append((is_equation, []))
        parts[-1][1].append(line)
    return "\n\n".join((equations.block if eq else prose)("\n".join(lines)) for eq, lines in parts)


def prose(text: str) -> str:
    """Return prose of a docstring as Markdown, with links to papers."""
    escaped = escape(" ".join(text.split()))
    escaped = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", escaped)
    return OPENREVIEW.sub(lambda found: f"[{found.group()}](https://{found.group()})", escaped)


def _difference(text: str) -> str:
    """Return what differs from a paper, without the words of the heading."""
    found = text.partition(":")[2].strip()
    return prose(found[:1].upper() + found[1:])


def sentence(text: str) -> str:
    """Return the idea of a method as Markdown."""
    return escape(text)


def escape(text: str) -> str:
    """Return text in which only code in backquotes has a meaning for Markdown."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if index % 2 else re.sub(r"[\\_*<>|\[\]#$]", lambda found: f"&#{ord(found[0])};", part)
        for index, part in enumerate(parts)
    )
