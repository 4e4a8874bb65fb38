"""Deep copies of networks without references to the original.

`copy.deepcopy` does not copy functions and weak references. A lambda, a nested function or a hook that closes over
`self` therefore still runs the original network after a copy. Here such functions are rebuilt with the copies of the
objects in their closures, and a copy that would still refer to the original is refused with the name of the attribute.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from enfold.errors import EnfoldError

Memo = dict[int, Any]  # copies by the id of the original object, as in `copy.deepcopy`
NOT_COPIED = (ModuleType, type(threading.Lock()), type(threading.RLock()), threading.Event)
FREQUENT = frozenset([bool, int, float, str, type(None)])
CONTAINERS = frozenset([list, set, dict, OrderedDict])
OF_MODULES = frozenset(vars(nn.Module())) - {"_compiled_call_impl"}  # attributes of every module
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


def copy_network(network: nn.Module, memo: Memo | None = None) -> nn.Module:
    """Return a deep copy of a network, also if it stores activations of an earlier call.

    Args:
        network: The network.
        memo: Objects that replace objects of the original in the copy, by the ids of the originals.

    Raises:
        EnfoldError: If an attribute cannot be copied, or the copy would still use the original.
    """
    refuse_scripted(network)
    memo = memo or {}
    plain = copy_plain(network, {**memo})
    if plain is not None:
        return plain
    memo = {**find_uncopied(network), **detach_tensors(network), **memo}
    try:
        duplicate: nn.Module = copy.deepcopy(network, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise EnfoldError(
            f"a network must be copyable by copy.deepcopy, but {_name_uncopyable(network)} cannot be copied ({error}): "
            "create it in the forward pass, or store it in another object"
        ) from error
    rebind(duplicate, network, memo)
    return duplicate


def copy_plain(network: nn.Module, memo: Memo) -> nn.Module | None:
    """Return a deep copy of a network whose attributes are constants, tensors, modules and containers of constants.

    It equals `copy.deepcopy` and takes a tenth of the time. Returns None for any other network.
    """
    if id(network) in memo:
        known: nn.Module = memo[id(network)]
        return known
    kind = type(network)
    if not has_plain_class(kind):
        return None
    duplicate: nn.Module = kind.__new__(kind)
    memo[id(network)] = duplicate
    copies: dict[str, Any] = {}
    try:
        for key, value in vars(network).items():
            if key == "_modules":
                children = {name: None if m is None else copy_plain(m, memo) for name, m in value.items()}
                if any(children[name] is None and m is not None for name, m in value.items()):
                    return None
                copies[key] = type(value)(children)
            elif key in ("_parameters", "_buffers"):
                copies[key] = type(value)({name: _copy_tensor(tensor, memo) for name, tensor in value.items()})
            elif key in OF_MODULES and not value:  # such as most of the hooks
                copies[key] = type(value)() if type(value) in CONTAINERS else value
            elif key != "_compiled_call_impl":
                copies[key] = _copy_constant(value, memo)
    except (TypeError, RuntimeError):
        return None
    vars(duplicate).update(copies)
    return duplicate


def has_plain_class(kind: type) -> bool:
    """Return whether copies of such modules are made by the methods of `nn.Module`, not by those of a subclass."""
    if kind.__module__.startswith("torch.nn.modules.") and not issubclass(kind, nn.RNNBase):
        return True
    base: Any = nn.Module
    own: Any = kind
    inherited = own.__getstate__ is base.__getstate__ and own.__setstate__ is base.__setstate__
    return (
        inherited
        and own.__reduce_ex__ is object.__reduce_ex__
        and own.__reduce__ is object.__reduce__
        and not hasattr(own, "__deepcopy__")
        and own.__new__ is object.__new__
    )


def _copy_tensor(tensor: Tensor | None, memo: Memo) -> Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in memo:
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_leaf:
            raise TypeError("this tensor is not copied as a constant")
        copy.deepcopy(tensor, memo)  # which adds it to the memo
    known: Tensor = memo[id(tensor)]
    return known


def _copy_constant(value: Any, memo: Memo) -> Any:
    """Return a copy of a constant or of a container of constants; raises TypeError for any other object."""
    kind = type(value)
    if kind in FREQUENT or (kind not in CONTAINERS and isinstance(value, CONSTANTS)):
        return value
    if kind is tuple:
        return tuple(_copy_constant(item, memo) for item in value)
    if kind is FunctionType and value.__closure__ is None and not vars(value):
        _copy_constant(value.__defaults__, memo)
        _copy_constant(value.__kwdefaults__, memo)
        return value
    if kind not in CONTAINERS:
        raise TypeError("this object is not a constant")
    if id(value) not in memo:
        if kind in (list, set):
            memo[id(value)] = kind(_copy_constant(item, memo) for item in value)
        else:
            memo[id(value)] = kind((_copy_constant(k, memo), _copy_constant(v, memo)) for k, v in value.items())
    return memo[id(value)]


def refuse_scripted(network: nn.Module) -> None:
    """Raise EnfoldError for scripted and traced modules: their parameters are not Python attributes."""
    for name, module in network.named_modules():
        refuse_scripted_module(module, name or type(network).__name__)


def refuse_scripted_module(module: nn.Module, name: str) -> None:
    """Raise EnfoldError if this module itself is scripted or traced."""
    if isinstance(module, torch.jit.ScriptModule):
        raise EnfoldError(
            f"a network must be a Python module, but '{name}' is a scripted or traced module: pass the nn.Module from "
            "which it was made"
        )


def rebind(duplicate: nn.Module, network: nn.Module, memo: Memo) -> None:
    """Rebuild the functions in a deep copy that close over objects of the original.

    Args:
        duplicate: The copy, changed in place.
        network: The original.
        memo: The memo of the `copy.deepcopy` that made the copy.

    Raises:
        EnfoldError: If an object in the copy refers to the original and cannot be rebuilt.
    """
    _Rebinder(network, memo).visit(duplicate, type(network).__name__)


class _Rebinder:
    """One traversal of a copy that replaces references to the original."""

    def __init__(self, network: nn.Module, memo: Memo) -> None:
        self.memo = memo
        self.copies = {id(value) for value in memo.values()}
        self.originals = {id(module) for module in network.modules()}
        self.originals |= {id(tensor) for tensor in network.parameters()}
        self.visited: set[int] = set()
        self.cells: dict[int, CellType] = {}

    def visit(self, value: Any, path: str) -> Any:
        """Return the replacement of a value in the copy; containers and modules are changed in place."""
        rebuilt = self._rebuild(value, path)
        if rebuilt is not value:
            return rebuilt
        if id(value) in self.visited:
            return value
        self.visited.add(id(value))
        if id(value) in self.originals:
            raise EnfoldError(
                f"a copy of a network must not use the original, but '{path}' of the copy refers to it: replace it by "
                "a method, or look up the module in the forward pass"
            )
        if isinstance(value, MutableMapping):
            self._replace(value, value.items(), path)
        elif isinstance(value, list):
            self._replace(value, enumerate(value), path)
        elif id(value) in self.copies and not isinstance(value, Tensor | type) and hasattr(value, "__dict__"):
            self._replace(vars(value), vars(value).items(), path)
        return value

    def _rebuild(self, value: Any, path: str) -> Any:
        """Return a new object for a value that cannot be changed in place, or the value."""
        if isinstance(value, FunctionType):
            return self._rebuild_function(value, path)
        if isinstance(value, MethodType):
            owner = self._replacement(value.__self__, path)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            parts = [self._replacement(part, path) for part in (value.func, *value.args)]
            named = {key: self._replacement(part, path) for key, part in value.keywords.items()}
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

    def _replace(self, container: Any, items: Iterable[tuple[Any, Any]], path: str) -> None:
        for key, value in list(items):
            inner = path if key in ("_modules", "_parameters", "_buffers") else f"{path}.{key}"
            found = self.visit(value, inner)
            if found is not value:
                container[key] = found

    def _rebuild_function(self, function: FunctionType, path: str) -> FunctionType:
        """Return the function with copies of its closure and of its defaults."""
        if id(function) in self.memo:
            twin: FunctionType = self.memo[id(function)]
            return twin
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        if not (cells or defaults or named):
            return function
        own = tuple(self.cells.setdefault(id(cell), CellType()) for cell in cells)
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, own or None)
        self.memo[id(function)] = twin  # before the cells are filled, because a function may close over itself
        vars(twin).update(vars(function))
        twin.__qualname__, twin.__doc__, twin.__module__ = function.__qualname__, function.__doc__, function.__module__
        twin.__defaults__ = tuple(self._replacement(value, path) for value in defaults) or None
        twin.__kwdefaults__ = {key: self._replacement(value, path) for key, value in named.items()} or None
        for name, cell, new in zip(function.__code__.co_freevars, cells, own, strict=True):
            try:
                new.cell_contents = self._replacement(cell.cell_contents, f"{path} ({name})")
            except ValueError:  # an empty cell
                continue
        return twin

    def _replacement(self, value: Any, path: str) -> Any:
        """Return the value that a rebuilt function uses instead of a value of the original function."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if self._holds_originals(value):
            duplicate = copy.deepcopy(value, self.memo)
            self.copies.add(id(duplicate))
            return self.visit(duplicate, path)
        return self._rebuild(value, path)

    def _holds_originals(self, value: Any) -> bool:
        """Return whether a container has an object of the original in it; a list that a hook appends to has none."""
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, list | tuple | set):
            return False
        return any(id(item) in self.memo or self._holds_originals(item) for item in value)


def detach_tensors(network: nn.Module) -> Memo:
    """Return detached copies of the tensors in the modules' attributes, as a memo for `copy.deepcopy`."""
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
        except RuntimeError:  # from a vmap that has ended, or a view of a tensor that was modified later
            memo[id(value)] = None
    elif isinstance(value, list | tuple | set):
        for item in value:
            _detach(item, memo)
    elif isinstance(value, dict):
        _detach(list(value.values()), memo)


def find_uncopied(network: nn.Module) -> Memo:
    """Return the attributes that copies use jointly with the original: locks, events and Python modules."""
    values = (value for module in network.modules() for value in vars(module).values())
    return {id(value): value for value in values if isinstance(value, NOT_COPIED)}


def _name_uncopyable(network: nn.Module) -> str:
    """Return the name of the attribute that cannot be copied, for an error message."""
    for prefix, module in network.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers") or isinstance(value, NOT_COPIED):
                continue
            try:
                copy.deepcopy(value, detach_tensors(module))
            except Exception:  # of the user's own class
                return f"'{prefix}.{key}'" if prefix else f"'{key}'"
    return f"this {type(network).__name__}"
