"""Settings of methods, read off their classes: what each one means, and of which type it must be."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from enfold.arguments import Argument, arguments_of
from enfold.errors import EnfoldError

COMMON = {  # settings that mean the same in all methods; a comment of the method's own goes before it
    "num_members": "how many members; in a run, as many as the run has",
    "seed": "of all that the method draws; in a run, the run's",
    "engine": "what runs the members: auto, measure (times all), stacked, loop or vmap",
    "include": "patterns of the names of layers that are shared so; all of them if empty",
    "exclude": "patterns of the names of layers that are left as they are",
    "batch_norm": "shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members)",
}

USUAL_MEMBERS = 4  # the default of a method that has no published number of its own
OWN_NUMBER = "how many members; a number of the method's own, whatever the run's: set it to change it"


def meanings(kind: type[Any]) -> dict[str, str]:
    """One line for each setting of a method; "" where nobody said what it means."""
    if not dataclasses.is_dataclass(kind):
        return {name: argument.help for name, argument in arguments_of(kind).items()}
    said = dict[str, str]()
    for parent in reversed(kind.__mro__):
        if dataclasses.is_dataclass(parent):
            said |= _comments(parent)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    common = {**COMMON, "num_members": OWN_NUMBER} if has_own_number(kind) else COMMON
    hints = get_type_hints(kind)
    return {name: _with_choices(said.get(name) or common.get(name, ""), hints[name]) for name in fields}


def _with_choices(meaning: str, hint: Any) -> str:
    """What a setting means, and the values that it may have, if not all of them are told."""
    choices = [value for part in (hint, *get_args(hint)) if get_origin(part) is Literal for value in get_args(part)]
    if all(re.search(rf"\b{re.escape(str(value))}\b", meaning) for value in choices):
        return meaning
    return f"{meaning} (one of {', '.join(map(str, choices))})".lstrip()


def has_own_number(kind: type[Any]) -> bool:
    """Whether a run leaves the method's number of members as it is, because it is a published one."""
    if not dataclasses.is_dataclass(kind):
        return bool(arguments_of(kind)["num_members"].default != USUAL_MEMBERS)
    number = {field.name: field.default for field in dataclasses.fields(kind)}.get("num_members", USUAL_MEMBERS)
    return number != USUAL_MEMBERS


def default_of(field: Any) -> str:
    """A setting's default as it is written in Python."""
    if isinstance(field, Argument):
        return repr(field.default)
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "made anew" if field.default_factory is not dataclasses.MISSING else "must be given"


def _comments(kind: type[Any]) -> dict[str, str]:
    """What is behind a field on its last line, `name: type = default  # meaning`."""
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    fields = [node for node in getattr(body, "body", []) if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: comments[node.end_lineno]
        for node in fields
        if isinstance(node.target, ast.Name) and node.end_lineno in comments
    }


PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # a type: what it is called, and whether a value is of it
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
}


def require_types(settings: Any) -> None:
    """Refuse settings that are not of the types that their class declares, before anything is computed with them."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            chosen = field.default is dataclasses.MISSING or "one of" in _rule(hint)
            remedy = "choose one" if chosen else f"{field.default!r} is usual"
            raise EnfoldError(f"the {field.name} must be {_rule(hint)}, got {value!r}: {remedy}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; of those that are no plain values, all are taken."""
    if hint in PLAIN:
        return PLAIN[hint][1](value)
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if get_origin(hint) is tuple:
        whole = isinstance(value, tuple | list)
        if whole and parts[-1] is not Ellipsis:
            return len(value) == len(parts) and all(map(_fits, value, parts))
        return whole and all(_fits(each, parts[0]) for each in value)
    return isinstance(value, hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else True


def _rule(hint: Any) -> str:
    """What a type asks for, in words."""
    parts = get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint][0]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(hint) is tuple:
        return f"a tuple, each value of it {_rule(parts[0])}"
    return " or ".join(_rule(part) for part in parts if part is not NoneType) or f"a {getattr(hint, '__name__', hint)}"
