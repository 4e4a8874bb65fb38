"""The settings of a network: what its modules hold beside tensors and other modules."""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

LONGEST = 1000  # items of a list that are compared
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
SKIPPED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")


def attributes(network: nn.Module) -> dict[str, object]:
    """Return the numbers, strings, functions and classes that a network's modules hold, by name, for comparison."""
    found: dict[str, object] = {}
    for prefix, module in network.named_modules():
        path = f"{prefix}." if prefix else ""
        found[f"{path}__class__"] = _class(type(module))
        for key, value in vars(module).items():
            if key.endswith("_hooks"):
                value = list(value.values())  # the keys are numbered through all modules of the process
            if key not in SKIPPED:
                found[f"{path}{key}"] = _plain(value)
    return found


def numbers(network: nn.Module) -> dict[str, object]:
    """Return the numbers and strings that a network's modules hold, by name: what a forward pass may count in."""
    return {name: value for name, value in attributes(network).items() if isinstance(value, int | str)}


def first_difference(ours: dict[str, object], theirs: dict[str, object]) -> str | None:
    """Return the name of the first attribute that differs, or None."""
    return next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)


def _plain(value: Any) -> object:
    """Return something that is equal for equal settings; of other objects, only their class is compared."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float | complex):
        return repr(value)  # not a number is equal to itself here
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_plain(item) for item in list(value)[:LONGEST])
    if isinstance(value, dict):
        return type(value), tuple((repr(key), _plain(item)) for key, item in list(value.items())[:LONGEST])
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        own = tuple(_plain(cell) if isinstance(cell, (*PLAIN, float, FunctionType)) else type(cell) for cell in cells)
        return value.__code__, own, _plain(value.__defaults__), _plain(value.__kwdefaults__)
    if isinstance(value, partial):
        return _plain(value.func), _plain(value.args), _plain(value.keywords)
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__
    return _class(value if isinstance(value, type) else type(value))


def _class(kind: type) -> object:
    """Return what is equal for classes of one code; parametrizations make a class for every module."""
    return kind.__module__, kind.__qualname__, getattr(vars(kind).get("forward"), "__code__", None)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
