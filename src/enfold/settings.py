"""Settings: what each one of a method means, read off the comment behind it in the method's class."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from typing import Any

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
    said = dict[str, str]()
    for parent in reversed(kind.__mro__):
        if dataclasses.is_dataclass(parent):
            said |= _comments(parent)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    common = {**COMMON, "num_members": OWN_NUMBER} if has_own_number(kind) else COMMON
    return {name: said.get(name) or common.get(name, "") for name in fields}


def has_own_number(kind: type[Any]) -> bool:
    """Whether a run leaves the method's number of members as it is, because it is a published one."""
    number = {field.name: field.default for field in dataclasses.fields(kind)}.get("num_members", USUAL_MEMBERS)
    return number != USUAL_MEMBERS


def default_of(field: dataclasses.Field[Any]) -> str:
    """A setting's default as it is written in Python."""
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
