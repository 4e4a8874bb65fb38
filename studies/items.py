"""The items of the five works: what implements each, the command that makes its result, and where it is recorded.

`items.yaml` is the list; `docs/coverage.md` shows it, filled by `python -m studies.pages`. The check refuses an item
whose file, study, method or recipe does not exist, and a complete one without a recorded result.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter

from enfold.registry import methods
from enfold.run.yaml_text import read_yaml
from studies.claims import StrictModel
from studies.definition import list_names
from studies.markdown import make_table

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "items.yaml"
Status = Literal["complete", "partial", "not recorded", "missing", "unavailable"]
FAMILIES = {"train": "ensemble", "distill": "distill", "merge": "merge"}


class Item(StrictModel):
    """One item of a work."""

    what: str
    where: str  # a file or folder
    run: str  # a study, a command, or a function
    status: Status
    result: str | None = None
    note: str = ""


@cache
def load_items(file: Path = FILE) -> dict[str, list[Item]]:
    """Return the items of each work."""
    return TypeAdapter(dict[str, list[Item]]).validate_python(read_yaml(file.read_text(encoding="utf-8")))


def check_items(file: Path = FILE, root: Path = ROOT) -> Iterator[str]:
    """Yield items that name what does not exist, or claim more than is recorded."""
    for work, items in load_items(file).items():
        for item in items:
            for problem in _problems(item, root):
                yield f"{file.name}, {work}, {item.what}: {problem}"


def _problems(item: Item, root: Path) -> Iterator[str]:
    for path in (item.where, item.result):
        if path is not None and not (root / path).exists():
            yield f"there is no {path}"
    if item.status == "complete" and item.result is None:
        yield "a complete item must have a recorded result"
    if item.status == "not recorded" and item.result is not None:
        yield "an item that is not recorded must have no result"
    if item.status != "complete" and not item.note:
        yield "an item that is not complete must have a note"
    if not _runs(item.run, root):
        yield f"there is no command '{item.run}'"


def _runs(command: str, root: Path) -> bool:
    """Return whether a study, or what a command names, exists."""
    words = shlex.split(command)
    if len(words) == 1:
        return command in list_names() or _is_function(command)
    if words[:2] == ["python", "-m"]:
        return find_spec(words[2]) is not None
    family = FAMILIES.get(words[1])
    if family is not None:
        return words[0] == "enfold" and words[3] in methods(family)
    return words[0] == "enfold" and all((root / word).exists() for word in words if word.endswith(".yaml"))


def _is_function(name: str) -> bool:
    import enfold

    return bool(re.fullmatch(r"enfold\.\w+", name)) and hasattr(enfold, name.removeprefix("enfold."))


def items_table(file: Path = FILE) -> str:
    """Return the number of items by status, and a table for each work."""
    found = load_items(file)
    counts = {work: Counter(item.status for item in items) for work, items in found.items()}
    total = sum(counts.values(), Counter[Status]())
    lines = [["work", "items", *get_args(Status)]]
    for work, count in [*counts.items(), ("all", total)]:
        lines.append([work, str(count.total()), *(str(count[status]) for status in get_args(Status))])
    parts = [make_table(lines)]
    for work, items in found.items():
        rows = [["item", "implemented in", "command", "result"], *map(_row, items)]
        parts.append(f"## {work}\n\n{make_table(rows, left=4)}")
    return "\n" + "\n".join(parts)


def _row(item: Item) -> list[str]:
    command = f"python -m studies {item.run}" if " " not in item.run and "." not in item.run else item.run
    result = f"[{item.status}](../{item.result})" if item.result else item.status
    text = f"{result}: {item.note}" if item.note else result
    return [item.what, f"[{Path(item.where).name}](../{item.where})", f"`{command}`", text]
