"""Write docs/methods.md from the registry: one row per method, its options with types and defaults, its paper.

python tools/make_methods_page.py           write the page
python tools/make_methods_page.py --check   exit with 1 if it is out of date
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from enfold.registry import PACKAGES, Method, methods, use_of

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
TITLES = {
    "ensemble": "Ensembles",
    "distill": "Distillation losses",
    "merge": "Merging",
    "perturb": "Perturbations of the inputs of a distillation",
}
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")


def row(method: Method) -> str:
    """Return | name | idea | paper |."""
    document = importlib.import_module(method.target.__module__).__doc__ or ""
    papers = [f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(ARXIV.findall(document))]
    return f"| [`{method.name}`](#{method.name}) | {method.idea} | {', '.join(papers) or '-'} |"


def options(method: Method) -> list[str]:
    """Return one row for each option."""
    rows = []
    for argument in method.arguments.values():
        cells = (f"`{argument.name}`", f"`{argument.type_name}`", f"`{argument.default_text}`", argument.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def page() -> str:
    """Return the page."""
    lines = [
        "# Methods",
        "",
        "Generated from signatures and docstrings by `make generated`. `enfold methods` and "
        "`enfold methods NAME` show the same in a terminal; the file of each method begins with its equations and with "
        "the differences from the paper.",
    ]
    for kind, title in TITLES.items():
        found = list(methods(kind).values())
        lines += ["", f"## {title}", "", "| method | idea | paper |", "| --- | --- | --- |", *map(row, found)]
    for kind in PACKAGES:
        for method in methods(kind).values():
            module = "enfold.merge" if kind == "merge" else "enfold"
            name = f"`{module}.{method.target.__name__}`"
            lines += ["", f"### {method.name}", "", f"{name}: {method.idea} Use: {use_of(method, '`')}.", ""]
            if method.arguments:
                lines += ["| option | type | default | description |", "| --- | --- | --- | --- |", *options(method)]
    return "\n".join(lines) + "\n"


def main(check: bool) -> int:
    """Write the page, or only compare it."""
    if not check:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"written: {PAGE}", file=sys.stderr)
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date: run make generated", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
