"""Write docs/methods.md from the registry: one row a method, its settings with their defaults, its paper."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from enfold.options import default_of, meanings

from enfold.registry import ROOMS, Method, methods

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
KINDS = {
    "share": "Shares: M members in less space, or drawn around one network",
    "fold": "Folds: M members to one network",
    "perturb": "Perturbations: what a fold does to inputs before teachers and student answer",
}
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")


def row(method: Method) -> str:
    """| name | idea | paper |"""
    document = importlib.import_module(method.kind.__module__).__doc__ or ""
    papers = ", ".join(
        f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(ARXIV.findall(document))
    )
    return f"| [`{method.name}`](#{anchor(method)}) | {method.idea} | {papers or '-'} |"


def anchor(method: Method) -> str:
    """Of its heading: a name that a room above has too is counted, as GitHub does."""
    above = list(ROOMS)[: list(ROOMS).index(method.room)]
    earlier = sum(method.name in methods(room) for room in above)
    return f"{method.name}-{earlier}" if earlier else method.name


def settings(method: Method) -> list[str]:
    """Each setting with its default and what it means."""
    lines, said = [], meanings(method.kind)
    for name, field in method.fields.items():
        kind = f"`{field.type}`".replace(" | None`", " or None`").replace("|", "\\|")
        kind = "a choice" if "(one of " in said[name] else kind
        lines.append(f"| `{name}` | `{default_of(field)}` | {kind} | {said[name]} |")
    return lines


def page() -> str:
    """The whole page."""
    lines = [
        "# Methods",
        "",
        "Made from the registry by `python tools/make_methods_page.py`. `enfold methods` and `enfold methods NAME` "
        "show the same in a terminal; "
        "each method's file opens with its equations and with what differs from the paper.",
    ]
    for room in ROOMS:
        found = list(methods(room).values())
        lines += ["", f"## {KINDS[room]}", "", "| method | idea | paper |", "| --- | --- | --- |", *map(row, found)]
    for room in ROOMS:
        for method in methods(room).values():
            lines += ["", f"### {method.name}", "", f"`enfold.{method.kind.__name__}`: {method.idea}", ""]
            lines += ["| setting | default | type | meaning |", "| --- | --- | --- | --- |", *settings(method)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}", file=sys.stderr)
