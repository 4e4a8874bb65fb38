"""What is wrong in a recipe, as one sentence: its file and line, the key, the rule, and what was given instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from enfold.errors import EnfoldError
from enfold.registry import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RULES = {  # what a value must be, by the beginning of pydantic's name of the error
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}
KINDS = {"shares": "share", "folds": "fold"}


@dataclass(frozen=True)
class Place:
    """Where a recipe was read from, the line of every key, and what it says."""

    where: str
    lines: Mapping[tuple[Any, ...], int]
    content: Mapping[str, Any]

    def at(self, path: tuple[Any, ...]) -> str:
        """File and line of the key, or of the nearest that it lies in."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.where}, line {self.lines[path]}" if path else self.where

    def owner(self, path: tuple[Any, ...]) -> str:
        """ " of share 'x'" for what lies in a share, a fold, the data or a plan."""
        if path[:1] == ("data",) and len(path) > 1:
            return " of data"
        plan = " of the plan" if "plan" in path[:-1] else ""
        if len(path) > 2 and path[0] in KINDS:
            return f"{plan} of {KINDS[path[0]]} '{self._label(*path[:2])}'"
        return plan

    def _label(self, room: str, index: int) -> str:
        spec = self.content[room][index]
        return str(spec.get("label") or spec.get("method") or index + 1) if isinstance(spec, Mapping) else str(spec)


def explained(error: ValidationError, place: Place, schema: type[Any], prefix: tuple[Any, ...] = ()) -> EnfoldError:
    """The first problem as one sentence."""
    problems = error.errors()
    first, path = problems[0], (*prefix, *problems[0]["loc"])
    at = place.at(path)
    if first["type"] == "extra_forbidden":
        return EnfoldError(f"{at}: {_unknown(str(path[-1]), first, schema)}")
    if not first["loc"]:  # the method itself says what is wrong
        return EnfoldError(f"{at}: {_message(first)}")
    path, item = _key(path, place)
    what = f"{item}'{path[-1]}'{place.owner(path)}"
    same = [each for each in problems if _key((*prefix, *each["loc"]), place)[0] == path]
    rule = _rule(same)
    given = "" if first["type"] == "missing" else f", got {str(first['input'])[:60]!r}"
    if rule is None:
        said = _message(first)
        return EnfoldError(f"{at}: {what} is wrong: {said}{'' if ', got ' in said else given}")
    return EnfoldError(f"{at}: {what} must be {rule}{given}")


def _key(path: tuple[Any, ...], place: Place) -> tuple[tuple[Any, ...], str]:
    """The path of the key that a problem is under, and which of several values it is."""
    start = 2 if path[0] in KINDS and len(path) > 2 else 1 if path[0] in ("data", "plan") and len(path) > 1 else 0
    if start == 2 and path[2] == "plan" and len(path) > 3:
        start = 3
    item = next((part for part in path[start + 1 :] if isinstance(part, int)), None)
    return path[: start + 1], "" if item is None else f"value {item + 1} of "


def _rule(problems: list[ErrorDetails]) -> str | None:
    """What a value must be: one of several kinds, if several are allowed; None if pydantic's own words are needed."""
    found: list[str] = []
    for each in problems:
        kind = each["type"]
        if kind == "missing":
            found.append("given")
        elif kind == "literal_error":
            found.append(f"one of {each['ctx']['expected'].replace(' or ', ', ')}")
        elif kind.split("_")[0] in RULES:
            found.append(RULES[kind.split("_")[0]])
        elif kind != "none_required":
            return None
    if "a number" in found:
        found = [rule for rule in found if rule != "a whole number"]
    return " or ".join(dict.fromkeys(found)) or None


def _message(problem: ErrorDetails) -> str:
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _unknown(name: str, problem: ErrorDetails, schema: type[Any]) -> str:
    owner = schema
    for part in problem["loc"][:-1]:
        field = getattr(owner, "model_fields", {}).get(part)
        kind = None if field is None else field.annotation
        owner = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else owner
    known = list(getattr(owner, "model_fields", None) or [])
    return f"there is no key '{name}'{nearest(name, known)}: the keys are {', '.join(known)}"


def lines_of(node: yaml.Node | None, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """The line of every key, by its path."""
    found: dict[tuple[Any, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            found[(*path, key.value)] = key.start_mark.line + 1
            found.update(lines_of(value, (*path, key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found[(*path, index)] = value.start_mark.line + 1
            found.update(lines_of(value, (*path, index)))
    return found
