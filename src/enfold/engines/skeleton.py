"""A network without values: its code, and the places where parameters and buffers are put for one call.

`torch.func.functional_call` does nearly this. Three things made us write it: a module that appears twice keeps the
swapped tensor after the call, a buffer that the network *reassigns* (instead of editing it in place) is lost, and the
look-up by dotted name on each call is a visible part of the latency of a small network.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from enfold.engines.copying import copied, detached_tensors, rebind, refuse_scripted, shared_attributes
from enfold.engines.recompute import entered
from enfold.errors import EnfoldError

RUNNING = ("running_mean", "running_var", "running_std")  # buffers that are statistics of the data
State = dict[str, Tensor]  # parameters and buffers by their names in the network

Place = tuple[dict[str, Tensor | None], str]  # a module's own dictionary of parameters or buffers, and the key in it


def places(network: nn.Module) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Where each parameter and each buffer lives; a tied tensor has one name, its first, and several places."""
    refuse_scripted(network)
    parameters: dict[str, list[Place]] = {}
    buffers: dict[str, list[Place]] = {}
    names: dict[int, str] = {}
    for prefix, module in network.named_modules():  # a module that appears twice is listed once
        for found, held in ((parameters, module._parameters), (buffers, module._buffers)):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise EnfoldError(
                        f"all parameters must be initialised, but '{prefix}.{key}' is lazy: "
                        "run one batch through the network first"
                    )
                name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                found.setdefault(name, []).append((held, key))
    return parameters, buffers


def read_state(network: nn.Module) -> State:
    """The network's own parameters and buffers, not copied; tied ones once."""
    parameters, buffers = places(network)
    state: State = {}
    for name, where in {**parameters, **buffers}.items():
        held, key = where[0]
        state[name] = _present(held[key])
    return state


def _aliases(network: nn.Module) -> dict[int, list[tuple[Any, Any]]]:
    """Return the attributes, lists and dictionaries of a network's modules that hold a registered tensor, by its id."""
    known = {id(tensor) for tensor in read_state(network).values()}
    found: dict[int, list[tuple[Any, Any]]] = {}

    def search(held: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if isinstance(value, Tensor):
                if id(value) in known:
                    found.setdefault(id(value), []).append((held, key))
            elif isinstance(value, list | dict):
                search(value, enumerate(value) if isinstance(value, list) else value.items())
            elif dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
                search(vars(value), vars(value).items())
            elif isinstance(value, tuple) and any(isinstance(item, Tensor) and id(item) in known for item in value):
                raise EnfoldError(
                    f"parameters may be held in lists and dictionaries as well, but '{key}' of this "
                    f"{type(network).__name__} is a tuple of them: make it a list"
                )

    for module in network.modules():
        own = vars(module)
        search(own, [item for item in own.items() if item[0] not in ("_parameters", "_buffers", "_modules")])
    return found


def empty_buffers(network: nn.Module) -> list[str]:
    """Return the names of the buffers that are None."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in network.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is None
    ]


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - places() lists only what is there
    return tensor


def _placeholders(network: nn.Module) -> dict[int, Tensor]:
    """Return a tensor without storage for every parameter and buffer, by the id of the original."""
    found: dict[int, Tensor] = {}
    for tensor in read_state(network).values():
        empty = torch.empty_like(tensor.detach(), device="meta")
        found[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return found


def _unset(tensor: Tensor) -> Tensor:
    """Return a tensor of that kind with one stored value for all: not a number, where there is such a value."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    empty = torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class Skeleton:
    """A copy of the user's network whose tensors are placeholders without storage."""

    def __init__(self, network: nn.Module) -> None:
        self.network = copied(network, _placeholders(network))
        self.parameters, self.buffers = places(self.network)
        aliases = _aliases(self.network)
        self.aliases = {
            name: aliases[id(tensor)] for name, tensor in read_state(self.network).items() if id(tensor) in aliases
        }
        self.writes_inputs = False  # whether the forward pass works in place on its inputs
        self.written: set[str] = set()  # the parameters that the forward pass changes in place
        self.trainable = {name for name, tensor in network.named_parameters() if tensor.requires_grad}
        self.empty = [
            (module._buffers, key)
            for module in self.network.modules()
            for key, tensor in module._buffers.items()
            if tensor is None
        ]
        self.forgets = True  # whether what a call puts into an empty buffer is taken out again
        named = network.named_parameters()
        self._originals = {id(tensor): (weakref.ref(tensor), name) for name, tensor in named}

    def name_of_original(self, tensor: Tensor | None) -> str | None:
        """Return the name of a parameter of the network that this is a copy of."""
        known = self._originals.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        try:
            return self._copy({**memo})
        except (NotImplementedError, RuntimeError):  # a class reads its tensors' values when it is copied
            for name in self.names:
                where = [*(self.parameters.get(name) or self.buffers[name]), *self.aliases.get(name, [])]
                self._fill(where, _unset(self._tensor(name)))
            return self._copy(memo)

    def _copy(self, memo: dict[int, Any]) -> Skeleton:
        memo.update({**shared_attributes(self.network), **detached_tensors(self.network)})
        twin = Skeleton.__new__(Skeleton)
        memo[id(self)] = twin
        with torch.inference_mode(False):
            vars(twin).update(copy.deepcopy(vars(self), memo))
            rebind(twin.network, self.network, memo)
        return twin

    @staticmethod
    def _fill(where: Iterable[tuple[Any, Any]], tensor: Tensor | None) -> None:
        for held, key in where:
            held[key] = tensor

    @property
    def names(self) -> list[str]:
        """All names of a state, parameters first."""
        return [*self.parameters, *self.buffers]

    def shape(self, name: str) -> torch.Size:
        """The shape of one network's tensor of that name."""
        return self._tensor(name).shape

    def _tensor(self, name: str) -> Tensor:
        held, key = (self.parameters.get(name) or self.buffers[name])[0]
        return _present(held[key])

    def names_in(self, module: nn.Module) -> dict[str, str]:
        """The names in a state of one module's own parameters and buffers, by their keys in the module."""
        every = {**self.parameters, **self.buffers}
        return {
            key: name
            for name, where in every.items()
            for held, key in where
            if held is module._parameters or held is module._buffers
        }

    @contextmanager
    def holding(self, state: Mapping[str, Tensor], *, again: bool = True) -> Iterator[nn.Module]:
        """The network with these values; what the call does to buffers ends up in `state`'s tensors.

        A checkpointed block gets them `again` in the backward pass, or is refused.
        """
        if parametrize._cache_enabled:
            parametrize._cache.clear()  # it is kept by module, and the module has other values now
        placeholders = [(where, where[0][0][where[0][1]]) for where in self._places_of(state)]
        for (where, _), tensor in zip(placeholders, state.values(), strict=True):
            self._fill(where, tensor)
        for name, also in self.aliases.items():
            self._fill(also, state[name])
        entered.contexts.append(partial(self._holding_again, state) if again else None)
        try:
            yield self.network
            self._keep_buffers(state)
        finally:
            entered.contexts.pop()
            if not entered.contexts:
                entered.blocks = 0  # one that raised was not left
            for where, placeholder in placeholders:
                self._fill(where, placeholder)
            for name, also in self.aliases.items():
                self._fill(also, self._tensor(name))
            for held, key in self.empty if self.forgets else ():  # what one member puts there is not for the next
                held[key] = None

    def _holding_again(self, state: Mapping[str, Tensor]) -> AbstractContextManager[nn.Module]:
        """The same values; statistics are not updated once more."""
        own = {name: tensor.clone() if name in self.buffers else tensor for name, tensor in state.items()}
        return self.holding(own)

    @torch.no_grad()
    def _keep_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Copy what the network put in a buffer's place into the state's own tensor."""
        for name, where in self.buffers.items():
            for held, key in where:
                current = held.get(key)
                if current is state[name]:
                    continue
                if current is None or current.shape != state[name].shape:
                    what = "nothing" if current is None else f"the shape {tuple(current.shape)}"
                    raise EnfoldError(
                        f"a buffer must keep its shape, but the forward gave '{name}' {what} instead of "
                        f"{tuple(state[name].shape)}: allocate it at its final size"
                    )
                state[name].copy_(current)

    def _places_of(self, state: Mapping[str, Tensor]) -> Iterator[list[Place]]:
        for name in state:
            yield self.parameters[name] if name in self.parameters else self.buffers[name]

    def materialise(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A plain network of the user's class with copies of these values and the original ties."""
        other = copy.deepcopy(self)
        for name, where in (*other.parameters.items(), *other.buffers.items()):
            value = state[name].detach().clone(memory_format=torch.contiguous_format)  # so that view(-1) works
            is_parameter = name in other.parameters
            tensor = nn.Parameter(value, requires_grad=name in self.trainable) if is_parameter else value
            self._fill([*where, *other.aliases.get(name, [])], tensor)
        return other.network
