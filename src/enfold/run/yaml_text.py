"""YAML as people write it: 1e-3 is a number, as in YAML 1.2 and in Python. Files hold data alone and never run code."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$|[-+]?\.[0-9]+[eE][-+]?[0-9]+$")


class Loader(yaml.SafeLoader):
    """Reads such numbers."""


class Dumper(yaml.SafeDumper):
    """Puts text that looks like such a number in quotes."""


for each in (Loader, Dumper):
    each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
for _first, _resolvers in Loader.yaml_implicit_resolvers.items():  # nothing here is a date: 2024-02-30 is a text
    _resolvers[:] = [(tag, pattern) for tag, pattern in _resolvers if tag != "tag:yaml.org,2002:timestamp"]


def read_yaml(text: str) -> Any:
    """What a text says; yaml.YAMLError if it is none."""
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506, it is a safe loader
    except ValueError as error:  # of what looks like a number and is none, as 0b_
        raise yaml.YAMLError(str(error)) from error


def write_yaml(content: Any, *, in_one_line: bool = False) -> str:
    """The text of plain content, in its order."""
    width = math.inf if in_one_line else None
    return str(
        yaml.dump(
            content, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=in_one_line, width=width
        )
    )
