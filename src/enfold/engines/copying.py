"""Deep copies of a network that refer to nothing of the original.

`copy.deepcopy` takes functions and weak references as they are. A lambda, a nested function or a hook over `self` that
a network keeps in an attribute therefore runs the original network after a copy. Here such functions are rebuilt with
the copies of what they close over, and what still refers to the original after that is refused by name.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from enfold.errors import EnfoldError

Memo = dict[int, Any]  # the copy of an object by the id of the original, as `copy.deepcopy` keeps it
SHARED = (ModuleType, type(threading.Lock()), type(threading.RLock()), threading.Event)


def copied(network: nn.Module, memo: Memo | None = None) -> nn.Module:
    """Return a deep copy of a network that shares nothing with it, also if it has been run and kept activations.

    Args:
        network: The network.
        memo: Objects that stand in the copy for objects of the original, by the ids of the originals.

    Raises:
        EnfoldError: If an attribute cannot be copied, or the copy would still use the original.
    """
    refuse_scripted(network)
    memo = {**shared_attributes(network), **detached_tensors(network), **(memo or {})}
    try:
        duplicate: nn.Module = copy.deepcopy(network, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise EnfoldError(
            f"a network must be copyable by copy.deepcopy, but {_uncopyable(network)} cannot be copied ({error}): "
            "create it when it is used, or keep it outside of the network"
        ) from error
    rebind(duplicate, network, memo)
    return duplicate


def refuse_scripted(network: nn.Module) -> None:
    """Refuse scripted and traced modules, whose parameters are not held in Python, by name."""
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise EnfoldError(
                f"a network must hold its parameters in Python, but '{name or type(network).__name__}' is a scripted "
                "or traced module: pass the nn.Module that it was made from"
            )


def rebind(duplicate: nn.Module, network: nn.Module, memo: Memo) -> None:
    """Rebuild the functions that a deep copy holds and that close over objects of the original.

    Args:
        duplicate: The copy, changed in place.
        network: The original.
        memo: The memo of the `copy.deepcopy` that made the copy.

    Raises:
        EnfoldError: If something in the copy refers to the original and cannot be rebuilt.
    """
    _Rebinder(network, memo).visit(duplicate, type(network).__name__)


class _Rebinder:
    """One walk over a copy that replaces what refers to the original."""

    def __init__(self, network: nn.Module, memo: Memo) -> None:
        self.memo = memo
        self.copies = {id(value) for value in memo.values()}
        self.originals = {id(module) for module in network.modules()}
        self.originals |= {id(tensor) for tensor in network.parameters()}
        self.visited: set[int] = set()
        self.cells: dict[int, CellType] = {}

    def visit(self, value: Any, path: str) -> Any:
        """Return what stands for the value in the copy; containers and modules are changed in place."""
        rebuilt = self._rebuilt(value, path)
        if rebuilt is not value:
            return rebuilt
        if id(value) in self.visited:
            return value
        self.visited.add(id(value))
        if id(value) in self.originals:
            raise EnfoldError(
                f"a copy of a network must not use the original, but '{path}' of the copy does: replace it by a "
                "method, or look the module up when it is used"
            )
        if isinstance(value, MutableMapping):
            self._replace(value, value.items(), path)
        elif isinstance(value, list):
            self._replace(value, enumerate(value), path)
        elif id(value) in self.copies and not isinstance(value, Tensor | type) and hasattr(value, "__dict__"):
            self._replace(vars(value), vars(value).items(), path)
        return value

    def _rebuilt(self, value: Any, path: str) -> Any:
        """Return a new object for a value that cannot be changed in place, or the value."""
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, MethodType):
            owner = self._content(value.__self__, path)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            parts = [self._content(part, path) for part in (value.func, *value.args)]
            named = {key: self._content(part, path) for key, part in value.keywords.items()}
            before = [value.func, *value.args, *value.keywords.values()]
            same = all(new is old for new, old in zip([*parts, *named.values()], before, strict=True))
            return value if same else partial(parts[0], *parts[1:], **named)
        if isinstance(value, weakref.ref):
            target = self.memo.get(id(value()))
            return value if target is None else weakref.ref(target)
        if type(value) in (tuple, set, frozenset):
            items = [self.visit(item, path) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
        return value

    def _replace(self, held: Any, items: Iterable[tuple[Any, Any]], path: str) -> None:
        for key, value in list(items):
            inner = path if key in ("_modules", "_parameters", "_buffers") else f"{path}.{key}"
            found = self.visit(value, inner)
            if found is not value:
                held[key] = found

    def _function(self, function: FunctionType, path: str) -> FunctionType:
        """Return the function with the copies of what it closes over and of its defaults."""
        if id(function) in self.memo:
            twin: FunctionType = self.memo[id(function)]
            return twin
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        if not (cells or defaults or named):
            return function
        own = tuple(self.cells.setdefault(id(cell), CellType()) for cell in cells)
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, own or None)
        self.memo[id(function)] = twin  # before the cells are filled: a function may close over itself
        vars(twin).update(vars(function))
        twin.__qualname__, twin.__doc__, twin.__module__ = function.__qualname__, function.__doc__, function.__module__
        twin.__defaults__ = tuple(self._content(value, path) for value in defaults) or None
        twin.__kwdefaults__ = {key: self._content(value, path) for key, value in named.items()} or None
        for name, cell, new in zip(function.__code__.co_freevars, cells, own, strict=True):
            try:
                new.cell_contents = self._content(cell.cell_contents, f"{path} ({name})")
            except ValueError:  # an empty cell
                continue
        return twin

    def _content(self, value: Any, path: str) -> Any:
        """Return what a rebuilt function uses in place of a value of the original's."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if self._holds_originals(value):
            duplicate = copy.deepcopy(value, self.memo)
            self.copies.add(id(duplicate))
            return self.visit(duplicate, path)
        return self._rebuilt(value, path)

    def _holds_originals(self, value: Any) -> bool:
        """Tell whether a container has an object of the original in it; a list that a hook writes to has none."""
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, list | tuple | set):
            return False
        return any(id(item) in self.memo or self._holds_originals(item) for item in value)


def detached_tensors(network: nn.Module) -> Memo:
    """Return copies of the tensors in the modules' attributes, cut from their graphs, as a memo for `copy.deepcopy`."""
    memo: Memo = {}
    for module in network.modules():
        _detach([value for key, value in vars(module).items() if key != "_modules"], memo)
    return memo


def _detach(value: object, memo: Memo) -> None:
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or is_lazy(value):
            return
        try:
            if not (value.is_leaf and value.requires_grad):
                memo[id(value)] = copy.deepcopy(value.detach())
        except RuntimeError:  # left over from a vmap that has ended, or from a view of values that have changed since
            memo[id(value)] = None
    elif isinstance(value, list | tuple | set):
        for item in value:
            _detach(item, memo)
    elif isinstance(value, dict):
        _detach(list(value.values()), memo)


def shared_attributes(network: nn.Module) -> Memo:
    """Return the attributes that copies share because they hold no values: locks, Python modules, generators."""
    values = (value for module in network.modules() for value in vars(module).values())
    return {id(value): value for value in values if isinstance(value, SHARED)}


def _uncopyable(network: nn.Module) -> str:
    """Name the attribute that keeps a network from being copied."""
    for prefix, module in network.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers") or isinstance(value, SHARED):
                continue
            try:
                copy.deepcopy(value, detached_tensors(module))
            except Exception:  # of the user's own class
                return f"'{prefix}.{key}'" if prefix else f"'{key}'"
    return f"this {type(network).__name__}"
