"""Skeleton: a network without values, into which the parameters and buffers of one member are put for one call.

`torch.func.functional_call` does nearly this. It is not used because a module that appears twice keeps the new tensor
after the call, a buffer that the network *reassigns* (instead of modifying it in place) is lost, and looking up dotted
names in each call is a large fraction of the latency of a small network.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from enfold.engines.copying import (
    copy_network,
    copy_plain,
    detach_tensors,
    find_uncopied,
    rebind,
    refuse_scripted_module,
)
from enfold.engines.inputs import copy_write_record, has_input_writes
from enfold.errors import EnfoldError

__all__ = ["RUNNING", "Skeleton", "State", "copy_network", "empty_buffers", "find_places", "read_state"]

RUNNING = ("running_mean", "running_var", "running_std")  # buffers that are statistics of the data
State = dict[str, Tensor]
"""Parameters and buffers by their names in the network."""

Place = tuple[dict[str, Tensor | None], str]  # the dictionary `_parameters` or `_buffers` of a module, and a key in it


def find_places(network: nn.Module) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Return the places of each parameter and of each buffer; a tied tensor has one name, its first, and many places.

    Raises:
        EnfoldError: If a module is scripted, or a parameter is lazy.
    """
    parameters: dict[str, list[Place]] = {}
    buffers: dict[str, list[Place]] = {}
    names: dict[int, str] = {}
    for prefix, module in network.named_modules():  # a module that appears twice is listed once
        refuse_scripted_module(module, prefix or type(network).__name__)
        for found, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise EnfoldError(
                        f"all parameters must be initialised, but '{prefix}.{key}' is not: "
                        "run one batch through the network first"
                    )
                name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                found.setdefault(name, []).append((tensors, key))
    return parameters, buffers


def read_state(network: nn.Module) -> State:
    """Return the parameters and buffers of a network, not copied; tied tensors once."""
    parameters, buffers = find_places(network)
    state: State = {}
    for name, where in {**parameters, **buffers}.items():
        tensors, key = where[0]
        state[name] = _require_tensor(tensors[key])
    return state


def find_aliases(network: nn.Module) -> dict[str, list[tuple[Any, Any]]]:
    """Return the attributes, lists and dictionaries of modules that refer to a registered tensor, by its name."""
    known = {id(tensor): name for name, tensor in read_state(network).items()}
    found: dict[str, list[tuple[Any, Any]]] = {}

    def search(container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if isinstance(value, Tensor):
                if id(value) in known:
                    found.setdefault(known[id(value)], []).append((container, key))
            elif isinstance(value, list | dict):
                search(value, enumerate(value) if isinstance(value, list) else value.items())
            elif dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
                search(vars(value), vars(value).items())
            elif isinstance(value, tuple) and any(isinstance(item, Tensor) and id(item) in known for item in value):
                raise EnfoldError(
                    f"parameters may also be stored in lists and dictionaries, but '{key}' of this "
                    f"{type(network).__name__} is a tuple of parameters: make it a list"
                )

    for module in network.modules():
        own = vars(module)
        search(own, [item for item in own.items() if item[0] not in ("_parameters", "_buffers", "_modules")])
    return found


def find_views(network: nn.Module) -> dict[str, str]:
    """Return the parameters of which attributes are views, by the names of the attributes.

    A copy of the network has a copy of such a tensor, which does not follow the parameter when it is trained.
    """
    parameters = {
        tensor.untyped_storage()._cdata: name for name, tensor in network.named_parameters() if _has_storage(tensor)
    }
    return {
        f"{prefix}.{key}" if prefix else key: parameters[value.untyped_storage()._cdata]
        for prefix, module in network.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and _has_storage(value)
        and value.untyped_storage()._cdata in parameters
    }


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def empty_buffers(network: nn.Module) -> list[str]:
    """Return the names of the buffers that are None."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in network.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is None
    ]


def _require_tensor(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - find_places() lists only tensors
    return tensor


def _make_placeholders(network: nn.Module) -> dict[int, Tensor]:
    """Return a tensor without storage for every parameter and buffer, by the id of the original."""
    found: dict[int, Tensor] = {}
    for tensor in read_state(network).values():
        empty = torch.empty_like(tensor.detach(), device="meta")
        found[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return found


def _make_unset(tensor: Tensor) -> Tensor:
    """Return a tensor of that shape and dtype which stores one value: NaN, where the dtype has it."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    empty = torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _fill(where: Iterable[tuple[Any, Any]], tensor: Tensor | None) -> None:
    for container, key in where:
        container[key] = tensor


class Skeleton:
    """A copy of the user's network whose tensors are placeholders without storage.

    Attributes:
        network: The copy.
        parameters: The places of each parameter, by its name.
        buffers: The places of each buffer, by its name.
        trainable: The names of the parameters that require a gradient.
        written: The names of the parameters that the forward pass modifies in place.
        is_private: Whether one member alone runs this code, so that attributes and buffers that a call sets stay set.
        recomputes: Whether the network runs blocks again in the backward pass, as `torch.utils.checkpoint` does; None
            before `verify.find_recomputation`.
        is_reentrant: Whether it does so with ``use_reentrant=True``.
        views: The parameters of which attributes of the original network are views, by the names of the attributes.
    """

    def __init__(self, network: nn.Module) -> None:
        self._set_network(copy_network(network, _make_placeholders(network)))
        self.aliases = find_aliases(self.network)
        self.views = find_views(network)
        self.written: set[str] = set()
        self.trainable = {name for name, tensor in network.named_parameters() if tensor.requires_grad}
        self.is_private = False
        self.recomputes: bool | None = None
        self.is_reentrant = False
        named = network.named_parameters()
        self._originals = {id(tensor): (weakref.ref(tensor), name) for name, tensor in named}
        self._placeholders: State | None = None  # while the values of a call stay in the network

    def _set_network(self, network: nn.Module) -> None:
        self.network = network
        self.parameters, self.buffers = find_places(network)
        self.empty = [
            (module._buffers, key)
            for module in network.modules()
            for key, tensor in module._buffers.items()
            if tensor is None
        ]

    @property
    def writes_inputs(self) -> bool:
        """Return whether the forward pass modifies its inputs in place; see `inputs.call_and_watch`."""
        return has_input_writes(self.network)

    def name_of_original(self, tensor: Tensor | None) -> str | None:
        """Return the name of a parameter of the network that was copied."""
        known = self._originals.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        for name, placeholder in (self._placeholders or {}).items():
            memo[id(self._tensor(name))] = placeholder
        try:
            return self._copy({**memo})
        except (NotImplementedError, RuntimeError):  # a class that reads the values of its tensors when it is copied
            for name in self.names:
                self._fill_name(name, _make_unset(self._tensor(name)))
            return self._copy(memo)

    def _copy(self, memo: dict[int, Any]) -> Skeleton:
        twin = Skeleton.__new__(Skeleton)
        memo[id(self)] = twin
        with torch.inference_mode(False):
            network = copy_plain(self.network, {**memo})
            is_plain = network is not None  # then no attribute refers to a tensor
            if network is None:
                memo.update({**find_uncopied(self.network), **detach_tensors(self.network), **memo})
                network = copy.deepcopy(self.network, memo)
                rebind(network, self.network, memo)
        vars(twin).update(vars(self))
        twin._set_network(network)
        twin.aliases = {} if is_plain else find_aliases(network)
        twin.written, twin._placeholders = set(self.written), None
        copy_write_record(self.network, network)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_originals": {}, "_placeholders": None}

    @property
    def names(self) -> list[str]:
        """All names of a state, parameters first."""
        return [*self.parameters, *self.buffers]

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter or buffer in one network."""
        return self._tensor(name).shape

    def _places(self, name: str) -> list[Place]:
        return self.parameters.get(name) or self.buffers[name]

    def _tensor(self, name: str) -> Tensor:
        tensors, key = self._places(name)[0]
        return _require_tensor(tensors[key])

    def _fill_name(self, name: str, tensor: Tensor) -> None:
        _fill(self._places(name), tensor)
        _fill(self.aliases.get(name, ()), tensor)

    def names_in(self, module: nn.Module) -> dict[str, str]:
        """Return the names in a state of the parameters and buffers of one module, by their keys in the module."""
        every = {**self.parameters, **self.buffers}
        return {
            key: name
            for name, where in every.items()
            for tensors, key in where
            if tensors is module._parameters or tensors is module._buffers
        }

    @contextmanager
    def use_values(self, state: Mapping[str, Tensor], *, again: bool = True) -> Iterator[nn.Module]:
        """Give the network with these values inside the block; modifications of buffers end up in `state`'s tensors.

        A network with activation checkpointing needs its values in the backward pass, too. If gradients are enabled,
        they therefore stay in the network of a private skeleton, and for any other a copy of the network is run.

        Args:
            state: The values by name.
            again: Whether the values may stay in the network after the block.

        Raises:
            EnfoldError: If the values are needed in the backward pass, but `again` is false.
        """
        if self.recomputes and torch.is_grad_enabled():
            if not again:
                raise EnfoldError(
                    "a network with activation checkpointing needs its values in the backward pass, got an engine "
                    "that removes them before: use engine='loop'"
                )
            code = self if self.is_private else copy.deepcopy(self)
            with code._leave_values(state) as network:
                yield network
            return
        if parametrize._cache_enabled:
            parametrize._cache.clear()  # its keys are modules, and this module has other values now
        placeholders = [(where, where[0][0][where[0][1]]) for where in map(self._places, state)]
        for (where, _), tensor in zip(placeholders, state.values(), strict=True):
            _fill(where, tensor)
        for name, also in self.aliases.items():
            _fill(also, state[name])
        try:
            yield self.network
            self._store_buffers(state)
        finally:
            for where, placeholder in placeholders:
                _fill(where, placeholder)
            for name, also in self.aliases.items():
                _fill(also, self._tensor(name))
            for tensors, key in () if self.is_private else self.empty:  # another member must not see this buffer
                tensors[key] = None

    @contextmanager
    def _leave_values(self, state: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Give the network with these values, which stay in it; it must be run by one member alone."""
        if self._placeholders is None:
            self._placeholders = {name: self._tensor(name) for name in self.names}
        for name, tensor in state.items():
            self._fill_name(name, tensor)
        yield self.network
        self._store_buffers(state)
        for name in self.buffers:  # the backward pass must not update statistics a second time
            self._fill_name(name, state[name].clone())

    @torch.no_grad()
    def _store_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Copy buffers that the network reassigned into the state's own tensors."""
        for name, where in self.buffers.items():
            for tensors, key in where:
                current = tensors.get(key)
                if current is state[name]:
                    continue
                if current is None or current.shape != state[name].shape:
                    what = "None" if current is None else f"a tensor of shape {tuple(current.shape)}"
                    raise EnfoldError(
                        f"the forward pass must not change the shape of a buffer, but it set '{name}' of shape "
                        f"{tuple(state[name].shape)} to {what}: allocate it at its final size"
                    )
                state[name].copy_(current)

    def materialise(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return a plain network of the user's class with copies of these values and the original ties."""
        own: dict[str, Tensor] = {}
        for name in self.names:
            value = state[name].detach().clone(memory_format=torch.contiguous_format)  # so that view(-1) works
            is_parameter = name in self.parameters
            own[name] = nn.Parameter(value, requires_grad=name in self.trainable) if is_parameter else value
        with torch.inference_mode(False):
            plain = copy_plain(self.network, {id(self._tensor(name)): value for name, value in own.items()})
        if plain is not None:
            copy_write_record(self.network, plain)
            return plain
        other = copy.deepcopy(self)
        for name, value in own.items():
            other._fill_name(name, value)
        return other.network
