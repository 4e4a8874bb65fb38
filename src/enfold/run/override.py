"""Overrides: change one value of a recipe or step from the command line by its dotted key."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from enfold.errors import EnfoldError
from enfold.run.yaml_text import read_yaml, write_yaml

NAMED_BY = {  # the key of the name in what may be given by name alone
    "network": "name",
    "student": "name",
    "data": "source",
    "ood": "source",
    "steps": "method",
    "perturb": "method",
}


def apply_override(content: dict[str, Any], override: str) -> tuple[Any, ...]:
    """Set a dotted key, ``train.epochs=5``, whose value is read as YAML, and return its path, ("train", "epochs")."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise EnfoldError(
            f"an override must have the form a.b=value, got '{override}': write for example train.epochs=5"
        )
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        raise EnfoldError(
            f"an override's value must be YAML, got '{override}': quote it, or close its brackets"
        ) from error
    path, place, found = key.split("."), content, []
    for depth, part in enumerate(path):
        at = _place(place, part)
        if at is None:
            raise EnfoldError(
                f"an override goes to a key of a mapping or a place of a list, got '{override}', but "
                f"{'.'.join(path[:depth])} is {_instead(place, path[:depth], path[depth:], value)}"
            )
        found.append(at % len(place) if isinstance(at, int) else at)
        if depth + 1 == len(path):
            place[at] = value
        else:
            place = place.setdefault(at, {}) if isinstance(place, dict) else place[at]
    return tuple(found)


def _place(holder: Any, part: str) -> Any:
    """Return the key, or the number in a list, for one part of a dotted key; None if it does not exist."""
    if isinstance(holder, list):
        return int(part) if part in map(str, range(-len(holder), len(holder))) else None
    return part if isinstance(holder, dict) else None


def _instead(holder: Any, path: list[str], keys: list[str], value: Any) -> str:
    """Return the value that has no such key, and the text to write in place of the override."""
    where = ".".join(path)
    if isinstance(holder, list) and holder:
        return f"a list of {len(holder)}: choose a place from 0 to {len(holder) - 1}"
    named_by = NAMED_BY.get(next((part for part in reversed(path) if part.isalpha()), ""))
    if named_by is None or not isinstance(holder, str):
        return f"{'an empty list' if holder == [] else repr(holder)}: set {where} itself"
    for key in reversed(keys):
        value = {key: value}
    whole = write_yaml({named_by: holder, **value}, in_one_line=True)
    return f"{holder!r}: write  --set {shlex.quote(f'{where}={whole.strip()}')}"
