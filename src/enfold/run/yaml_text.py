"""Read and write YAML in which 1e-3 is a number, as in YAML 1.2 and in Python. Files contain data only, never code."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$|[-+]?\.[0-9]+[eE][-+]?[0-9]+$")

LARGEST = 1_000_000  # characters; a recipe has a few thousand
MOST = 100_000  # values
DEEPEST = 50


class Loader(yaml.SafeLoader):
    """A loader that reads such numbers."""


class Dumper(yaml.SafeDumper):
    """A dumper that quotes text that looks like such a number."""


for each in (Loader, Dumper):
    each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
for _first, _resolvers in Loader.yaml_implicit_resolvers.items():  # dates are text: 2024-02-30 is no date
    _resolvers[:] = [(tag, pattern) for tag, pattern in _resolvers if tag != "tag:yaml.org,2002:timestamp"]


def read_yaml(text: str) -> Any:
    """Return the content of a text; raise yaml.YAMLError if it is not YAML, or if its content would be too large."""
    _require_modest(text)
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506, it is a safe loader
    except ValueError as error:  # text that looks like a number, such as 0b_
        raise yaml.YAMLError(str(error)) from error


def read_text(path: Path) -> str:
    """Return the text of a YAML file; of one that is too large only the beginning, which `read_yaml` refuses."""
    with path.open(encoding="utf-8") as file:
        return file.read(LARGEST + 1)


def _require_modest(text: str) -> None:
    """Raise an error for texts that are deeply nested, or whose references repeat content until it fills the memory."""
    if len(text) > LARGEST:
        raise yaml.YAMLError(f"it must have at most {LARGEST:,} characters, got more: shorten it")
    values: dict[str, int] = {}  # number of values of each anchor
    inside: list[tuple[str | None, int]] = []  # enclosing collections, each with the number of preceding values
    total = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            values |= {anchor: total - before} if anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            inside.append((event.anchor, total))
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in inside):
                raise yaml.YAMLError(f"'*{event.anchor}' must not refer to a collection that contains it: write it out")
            total += values.get(str(event.anchor), 0)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            values[event.anchor] = 1
        total += isinstance(event, yaml.NodeEvent)
        if len(inside) > DEEPEST or total > MOST:
            raise yaml.YAMLError(
                f"it must contain at most {MOST:,} values with expanded references, nested at most {DEEPEST} deep, got "
                "more: simplify it"
            )


def write_yaml(content: Any, *, in_one_line: bool = False) -> str:
    """Return the text of plain content, in its order."""
    width = math.inf if in_one_line else None
    return str(
        yaml.dump(
            content, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=in_one_line, width=width
        )
    )
