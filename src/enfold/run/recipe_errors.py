"""Errors of recipes: one sentence with file, line, key, rule and the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from enfold.errors import EnfoldError
from enfold.registry import suggest
from enfold.train import TrainConfig

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RULES = {  # the rule, by the first word of pydantic's error type
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}
STEPS = "steps"
SETTINGS = [setting.name for setting in fields(TrainConfig)]


class RecipeError(EnfoldError):
    """An error in a recipe; the message begins with its place."""


@dataclass(frozen=True)
class Place:
    """Where a recipe was read from.

    Args:
        where: The name of the file.
        lines: The line of every key, by its path.
        content: The content.
        overrides: What was given on the command line, as it was written there, by the path of its key.
    """

    where: str
    lines: Mapping[tuple[Any, ...], int]
    content: Mapping[str, Any]
    overrides: Mapping[tuple[Any, ...], str] = field(default_factory=dict)

    def at(self, path: tuple[Any, ...]) -> str:
        """Return file and line of a key, or of the nearest key around it; of an override its text."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.where}, line {self.lines[path]}" if path else self.where

    def of_message(self, path: tuple[Any, ...], message: str) -> str:
        """Return the place of the first key below a path that a message names; of the path itself if it names none."""
        keys = {each[len(path)] for each in (*self.lines, *self.overrides) if each[: len(path)] == path != each}
        named = next((word for word in re.findall(r"\w+", message) if word in keys), None)
        return self.at(path if named is None else (*path, named))

    def owner(self, path: tuple[Any, ...]) -> str:
        """Return "of step 'x'" for a key of a step, "of data" or "of train" for keys of these; else ""."""
        if path[:1] == ("data",) and len(path) > 1:
            return "of data"
        train = "of train" if "train" in path[:-1] else ""
        if len(path) > 2 and path[0] == STEPS:
            return f"{train} of step '{self._label(path[1])}'".strip()
        return train

    def _label(self, index: int) -> str:
        spec = self.content[STEPS][index]
        return str(spec.get("label") or spec.get("method") or index + 1) if isinstance(spec, Mapping) else str(spec)


def describe_error(
    error: ValidationError, place: Place, schema: type[Any], prefix: tuple[Any, ...] = ()
) -> RecipeError:
    """Return the first problem of a validation as an error in one sentence.

    Args:
        error: The error of pydantic.
        place: The file and lines of the recipe.
        schema: The class that was validated.
        prefix: The path of the validated value in the recipe.
    """
    problems = error.errors()
    first, path = problems[0], (*prefix, *problems[0]["loc"])
    at = place.at(path)
    if first["type"] == "extra_forbidden":
        return RecipeError(f"{at}: {_unknown(str(path[-1]), first, schema)}")
    if not first["loc"]:  # of a check over several fields
        return RecipeError(f"{place.of_message(path, _message(first))}: {_message(first)}")
    path, item = _key(path, place)
    owner = place.owner(path)
    what = f"{item}'{path[-1]}'{f' {owner}' if owner else ''}"
    same = [each for each in problems if _key((*prefix, *each["loc"]), place)[0] == path]
    rule = _rule(same)
    given = "" if first["type"] == "missing" else f", got {str(first['input'])[:60]!r}"
    if rule is None:
        message = _message(first)
        return RecipeError(f"{at}: {what} is not valid: {message}{'' if ', got ' in message else given}")
    return RecipeError(f"{at}: {what} must be {rule}{given}")


def _key(path: tuple[Any, ...], place: Place) -> tuple[tuple[Any, ...], str]:
    """Return the path of the key that a problem concerns, and which of several values it is."""
    start = 2 if path[0] == STEPS and len(path) > 2 else 1 if path[0] in ("data", "train") and len(path) > 1 else 0
    if start == 2 and path[2] == "train" and len(path) > 3:
        start = 3
    item = next((part for part in path[start + 1 :] if isinstance(part, int)), None)
    return path[: start + 1], "" if item is None else f"value {item + 1} of "


def _rule(problems: list[ErrorDetails]) -> str | None:
    """Return the rule for a value, which may allow several types; None if pydantic's own message is needed."""
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
        found = [rule for rule in found if rule != "an integer"]
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
    if owner is schema and name in SETTINGS:
        return f"'{name}' is a training setting: write it as train.{name}, or under train:"
    return f"there is no key '{name}'{suggest(name, known)}: the keys are {', '.join(known)}"


def line_numbers(node: yaml.Node | None, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """Return the line of every key by its path."""
    found: dict[tuple[Any, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            found[(*path, key.value)] = key.start_mark.line + 1
            found.update(line_numbers(value, (*path, key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found[(*path, index)] = value.start_mark.line + 1
            found.update(line_numbers(value, (*path, index)))
    return found
