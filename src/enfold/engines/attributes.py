"""Attributes of networks: the settings in which two networks differ, and numbers that a forward pass changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from enfold.engines.copying import CONSTANTS, OF_MODULES, has_plain_class
from enfold.engines.skeleton import Skeleton

LONGEST = 1000  # items of a list that are compared
CONTAINERS = frozenset([dict, OrderedDict, list, tuple, set, type(None)])  # the most frequent other attributes
DEEPEST = 4  # functions in closures of functions that are compared
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
SKIPPED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_compiled_call_impl",
    "_flat_weights",
)  # the last: of nn.LSTM, its weights


def different_attribute(codes: Sequence[Skeleton]) -> tuple[int, str] | None:
    """Return the first member whose network has other attributes than the first one, and the name of the attribute."""
    first = read_attributes(codes[0].network)
    for index, code in enumerate(codes[1:], 1):
        if code is codes[0]:
            continue
        name = find_changed(first, read_attributes(code.network))
        if name is not None:
            return index, name
    return None


def read_attributes(network: nn.Module) -> dict[str, object]:
    """Return the numbers, strings, functions and classes in the attributes of a network's modules, for comparison."""
    found: dict[str, object] = {}
    for prefix, module in network.named_modules():
        path = f"{prefix}." if prefix else ""
        found[f"{path}__class__"] = _describe_class(type(module))
        for key, value in vars(module).items():
            if type(value) in CONTAINERS and not value and key not in SKIPPED:
                found[f"{path}{key}"] = type(value)
                continue
            if key.endswith("_hooks"):
                value = list(value.values())  # the keys are numbered across all modules of the process
            if key not in SKIPPED:
                found[f"{path}{key}"] = _describe(value)
    return found


def read_numbers(network: nn.Module) -> dict[tuple[str, str], object]:
    """Return the numbers and strings in the attributes of a network's modules: where a forward pass may count."""
    return {
        (prefix, key): repr(value) if isinstance(value, float | complex) else value  # NaN differs from itself
        for prefix, module in network.named_modules()
        for key, value in vars(module).items()
        if type(value) not in CONTAINERS and isinstance(value, int | str | float | complex)
    }


def read_tensors(network: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return where modules have tensors that are no parameters or buffers: the container and the key, by name."""
    found: dict[str, tuple[Any, Any]] = {}

    def search(container: Any, items: Iterable[tuple[Any, Any]], prefix: str, depth: int) -> None:
        for key, value in items:
            if isinstance(value, Tensor):
                if not isinstance(value, nn.Parameter) and value.is_floating_point():
                    found[f"{prefix}{key}"] = (container, key)
            elif isinstance(value, list | dict) and value and depth < DEEPEST:
                inner = enumerate(value[:LONGEST]) if isinstance(value, list) else list(value.items())[:LONGEST]
                search(value, inner, f"{prefix}{key}.", depth + 1)

    for prefix, module in network.named_modules():
        own = vars(module)
        search(own, [item for item in own.items() if item[0] not in SKIPPED], f"{prefix}." if prefix else "", 0)
    return found


def find_changed(ours: Mapping[Any, object], theirs: Mapping[Any, object]) -> Any | None:
    """Return the name of the first attribute that differs, or None."""
    return next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)


def _describe(value: Any, depth: int = 0) -> object:
    """Return an object that is equal for equal settings; of unknown objects only the class is compared."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_describe(item) for item in islice(value, LONGEST))
    if isinstance(value, dict):
        return type(value), tuple((repr(key), _describe(item)) for key, item in islice(value.items(), LONGEST))
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        known = (*PLAIN, float, FunctionType) if depth < DEEPEST else ()  # a function may close over itself
        own = tuple(_describe(cell, depth + 1) if isinstance(cell, known) else type(cell) for cell in cells)
        return value.__code__, own, _describe(value.__defaults__), _describe(value.__kwdefaults__)
    if isinstance(value, partial):
        return _describe(value.func), _describe(value.args), _describe(value.keywords)
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__
    return _describe_class(value if isinstance(value, type) else type(value))


def _describe_class(kind: type) -> object:
    """Return an object that is equal for classes with the same code; parametrizations make a class for every module."""
    return kind.__module__, kind.__qualname__, getattr(vars(kind).get("forward"), "__code__", None)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def describe_code(network: nn.Module) -> list[object] | None:
    """Return a list that is equal for networks that consist of the same code: copies of them compute the same function.

    The networks have the same modules, constants and containers of constants, at the same places; only the values of
    their tensors may differ. Returns None for a network with any other attribute, such as an object or a closure.
    """
    describer = _Describer()
    try:
        describer.add_module(network)
    except TypeError:
        return None
    return describer.items


class _Describer:
    """The traversal of `describe_code`; an object that is found again is described by its number."""

    def __init__(self) -> None:
        self.items: list[object] = []
        self._numbers: dict[int, int] = {}

    def _is_known(self, value: object) -> bool:
        is_known = id(value) in self._numbers
        self.items.append(self._numbers.setdefault(id(value), len(self._numbers)))
        return is_known

    def add_module(self, module: nn.Module) -> None:
        """Add the description of a module."""
        if self._is_known(module):
            return
        if not has_plain_class(type(module)):
            raise TypeError("copies of this module may share objects")
        self.items.append(type(module))
        for key, value in vars(module).items():
            self.items.append(key)
            if key == "_modules":
                for name, child in value.items():
                    self.items.append(name)
                    self.items.append(None) if child is None else self.add_module(child)
            elif key in ("_parameters", "_buffers"):
                for name, tensor in value.items():
                    self.items.append(name)
                    self._add_tensor(tensor)
            elif key != "_compiled_call_impl" and (key not in OF_MODULES or value):
                self._add_constant(value)

    def _add_tensor(self, tensor: Tensor | None) -> None:
        if tensor is None or self._is_known(tensor):
            self.items.append(None)
        else:
            self.items.append((type(tensor), tensor.dtype, tensor.shape, tensor.stride()))

    def _add_constant(self, value: Any) -> None:
        kind = type(value)
        self.items.append(kind)
        if kind in (list, dict, OrderedDict):
            if self._is_known(value):
                return
            self.items.append(len(value))
            for item in value.items() if kind is not list else value:
                self._add_constant(item)
        elif kind is tuple:
            self.items.append(len(value))
            for item in value:
                self._add_constant(item)
        elif kind is set:
            if not self._is_known(value):
                self.items.append(sorted(map(repr, value)))
        elif isinstance(value, float | complex):
            self.items.append(repr(value))
        elif isinstance(value, CONSTANTS) or (kind is FunctionType and value.__closure__ is None):
            self.items.append(value)
        else:
            raise TypeError("this attribute is not a constant")
