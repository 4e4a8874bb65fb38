"""Identity: the inputs of a result as digests and settings by name, and the differences between two identities."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DIGEST = re.compile(r"[0-9a-f]{64}")
Identity = Mapping[str, Any]


def plain(identity: Identity) -> dict[str, Any]:
    """Return the identity as it is read back from a JSON file."""
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found


def differences(before: Identity, now: Identity) -> list[str]:
    """Return the names of entries that differ, with both values for settings."""
    old, new = (dict(_flat(plain(each))) for each in (before, now))
    return [
        _describe(name, old.get(name), new.get(name))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings under dotted names."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    elif tree != {}:
        yield name, tree


def _describe(name: str, old: Any, new: Any) -> str:
    if any(isinstance(value, str) and DIGEST.fullmatch(value) for value in (old, new)):
        return name
    return f"{name} ({_value(old)}, now {_value(new)})"


def _value(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
