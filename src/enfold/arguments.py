"""Arguments of methods: documented in Google style, typed, and checked in one place.

Every method (an ensemble class, a distillation loss, a perturbation, a merge function) documents its arguments in the
`Args:` section of its docstring and declares their types in its signature. The command line, the recipe schema and the
documentation read both with `arguments_of`; `checked` applies the types and limits when the method is called.

    @checked
    def average(models, train=None, *, power: Annotated[float, Field(gt=0)] = 1.0): ...
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from enfold.errors import EnfoldError, closest

F = TypeVar("F", bound=Callable[..., Any])

INPUTS = frozenset(
    [
        "self",
        "models",
        "network",
        "networks",
        "teacher",
        "train",
        "val",
        "test",
        "example",
        "config",
        "checkpoint",
        "cache",
        "on_epoch",
        "logger",
        "quiet",
        "executor",
        "title",
        "unpack",
        "outputs",
    ]
)
"""Parameters that are not options of a method: networks, data, and how the call is carried out."""
NETWORKS = {"network": "a torch.nn.Module", "networks": "a list of networks, or a network and num_members"}

REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Argument:
    """One argument of a method.

    Args:
        name: The name of the parameter.
        hint: The declared type, with its limits.
        default: The default value; `REQUIRED` if there is none.
        help: The description in the `Args:` section of the docstring, in one line.
    """

    name: str
    hint: Any
    default: Any
    help: str

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal` type; empty if any value of the type is allowed."""
        parts = [part for part in _parts(self.hint) if get_origin(part) is Literal]
        return tuple(value for part in parts for value in get_args(part))

    @property
    def type_name(self) -> str:
        """The type as it is shown in tables: `int`, `float | None`, `"a" | "b"`, with its limits."""
        return describe_type(self.hint)

    @property
    def default_text(self) -> str:
        """The default as Python code; "required" if there is none."""
        return "required" if self.default is REQUIRED else repr(self.default)


def arguments_of(target: Callable[..., Any]) -> dict[str, Argument]:
    """Return the options of a method by name, in the order of its signature.

    Args:
        target: A function, or a class, whose constructor is read.
    """
    hints, help_texts = _hints(target), describe_arguments(inspect.getdoc(target) or "")
    return {
        name: Argument(name, hints.get(name, Any), parameter.default, help_texts.get(name, ""))
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in INPUTS and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def describe_type(hint: Any) -> str:
    """Return a type in words for tables: `int >= 1`, `"sum" | "mean"`, `float | None`.

    Args:
        hint: A type annotation.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([describe_type(parts[0]), *_limits(parts[1:])])
    if origin is Literal:
        return " | ".join(_choices(hint))
    if origin in (Union, UnionType):
        return " | ".join(describe_type(part) for part in parts)
    if origin is tuple:
        return f"tuple of {describe_type(parts[0])}" if parts[-1] is Ellipsis else "tuple"
    if hint in (NoneType, Any):
        return "None" if hint is NoneType else "any"
    return str(getattr(hint, "__name__", hint)).removeprefix("typing.")


def describe_rule(hint: Any, plural: bool = False) -> str:
    """Return what a type allows, for error messages: `an integer >= 1`, `a tuple of 2 numbers or None`.

    Args:
        hint: The declared type, with its limits.
        plural: Describe several values of the type: `integers >= 1`.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint in NOUNS:
        return NOUNS[hint][plural]
    if origin is Annotated:
        rule, limits = describe_rule(parts[0], plural), _limits(parts[1:])
        if _is_finite(parts[1:]):
            rule = rule.replace("a number", "a finite number").replace("numbers", "finite numbers")
        return " ".join([rule, *limits])
    if origin is Literal:
        return f"{'values out of' if plural else 'one of'} {', '.join(_choices(hint))}"
    if origin in (Union, UnionType):
        return " or ".join(describe_rule(part, plural) for part in parts)
    if origin is tuple:
        return f"{'tuples' if plural else 'a tuple'} of {_describe_entries(parts)}"
    if origin is dict:
        return f"{'dicts' if plural else 'a dict'} of {' to '.join(describe_rule(part, True) for part in parts)}"
    return describe_type(hint)


NOUNS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "bools"),
    str: ("a string", "strings"),
    NoneType: ("None", "None"),
}
"""One value and several values of a plain type, in words."""


def _describe_entries(parts: tuple[Any, ...]) -> str:
    """Return what the entries of a tuple must be."""
    if parts[-1] is Ellipsis:
        return describe_rule(parts[0], plural=True)
    if all(part == parts[0] for part in parts):
        return f"{len(parts)} {describe_rule(parts[0], plural=True)}"
    return f"{len(parts)} values: {', '.join(describe_rule(part) for part in parts)}"


def _choices(hint: Any) -> list[str]:
    """Return the values of a `Literal` type as text."""
    return [f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(hint)]


def _limits(metadata: tuple[Any, ...]) -> list[str]:
    """Return the limits of an annotated type, such as `>= 1`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "and a multiple of"}
    limits = [
        f"{sign} {getattr(rule, name)}"
        for rule in _rules(metadata)
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return [" and ".join(limits).replace("and and", "and").removeprefix("and ")] if limits else []


def _is_finite(metadata: tuple[Any, ...]) -> bool:
    """Return whether an annotated type refuses infinity and NaN."""
    return any(getattr(rule, "allow_inf_nan", True) is False for rule in _rules(metadata))


def _rules(metadata: tuple[Any, ...]) -> list[Any]:
    """Return the constraints in the metadata of an annotated type, including those inside pydantic's `Field`."""
    return [rule for each in metadata for rule in getattr(each, "metadata", [each])]


def describe_arguments(docstring: str) -> dict[str, str]:
    """Return the descriptions in the `Args:` section of a Google-style docstring, each in one line.

    Args:
        docstring: The docstring, without common indentation.
    """
    found = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring + "\n", re.MULTILINE)
    if found is None:
        return {}
    entries: dict[str, list[str]] = {}
    lines = [line for line in found[1].splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    name = ""
    for line in lines:
        entry = re.match(rf"[ \t]{{{margin}}}\*{{0,2}}(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if entry:
            name, text = entry[1], entry[2]
            entries[name] = [text]
        elif name:
            entries[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in entries.items()}


def check_arguments(target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a method's options after checking names, types and limits.

    Lists become tuples and numpy scalars Python numbers; nothing else is converted.

    Args:
        target: The class or function.
        values: The options by name.

    Raises:
        EnfoldError: If a name is unknown, or a value is not of the declared type or outside its limits.
    """
    known = arguments_of(target)
    checked_values = {}
    for name, value in values.items():
        if name not in known:
            near = closest(name, known)
            suggestion = f", did you mean '{near}'?" if near else ""
            remedy = f"choose from {', '.join(known)}" if known else "it has none"
            raise EnfoldError(f"'{target.__name__}' has no option '{name}'{suggestion}: {remedy}")
        checked_values[name] = check_value(name, value, known[name].hint)
    return checked_values


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Return a value after checking it against a declared type.

    Args:
        name: Name of the argument.
        value: The value.
        hint: The declared type.

    Raises:
        EnfoldError: If it does not fit; the message names the argument, the rule and the value.
    """
    adapter = _adapter(hint)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(_plain(value), strict=True)
    except ValidationError:
        raise EnfoldError(f"{name} must be {describe_rule(hint)}, got {value!r}: change {name}") from None


def checked(target: F) -> F:
    """Return a function or class that checks its options against their declared types when it is called.

    Args:
        target: A class or function whose options are annotated.

    Raises:
        EnfoldError: When the function or class is called with a value that does not fit.
    """
    if isinstance(target, type):
        target.__init__ = _checked_call(target.__init__, target)  # type: ignore[misc]
        return target
    return _checked_call(target, target)  # type: ignore[return-value]


def _checked_call(function: Callable[..., Any], owner: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # whose own error names the function
        hints = _hints(owner)
        for name, value in bound.arguments.items():
            if value is None and name in NETWORKS and signature.parameters[name].default is REQUIRED:
                raise EnfoldError(f"{name} must be given, got None: pass {NETWORKS[name]}")
            if name not in INPUTS and name in hints:
                bound.arguments[name] = check_value(name, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call


@functools.cache
def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    return get_type_hints(inspect.unwrap(function), include_extras=True)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Return the validator of a type; None for types that are not plain values, which a method checks itself."""
    plain = (int, float, bool, str, NoneType)
    if not all(part in plain or get_origin(part) is Literal for part in _parts(hint)):
        return None
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def _parts(hint: Any) -> list[Any]:
    """Return the plain types that a hint consists of."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _parts(get_args(hint)[0])
    if origin in (Union, UnionType, tuple, dict):
        return [part for each in get_args(hint) if each is not Ellipsis for part in _parts(each)]
    return [hint]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value
