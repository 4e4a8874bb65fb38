"""A network without values: its code, and the places where parameters and buffers are put for one call.

`torch.func.functional_call` does nearly this. Three things made us write it: a module that appears twice keeps the
swapped tensor after the call, a buffer that the network *reassigns* (instead of editing it in place) is lost, and the
look-up by dotted name on each call is a visible part of the latency of a small network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from enfold.errors import EnfoldError
from enfold.members.recompute import entered

RUNNING = ("running_mean", "running_var", "running_std")  # buffers that are statistics of the data
State = dict[str, Tensor]  # parameters and buffers by their names in the network

Place = tuple[dict[str, Tensor | None], str]  # a module's own dictionary of parameters or buffers, and the key in it


def places(network: nn.Module) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Where each parameter and each buffer lives; a tied tensor has one name, its first, and several places."""
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
        tensor = held[key]
        assert tensor is not None  # noqa: S101 - places() lists only what is there
        state[name] = tensor
    return state


def copied(network: nn.Module) -> nn.Module:
    """A deep copy, also of a network that has been run and kept activations, which `copy.deepcopy` refuses."""
    duplicate: nn.Module = copy.deepcopy(network, _kept_tensors(network))
    return duplicate


def _kept_tensors(network: nn.Module) -> dict[int, Any]:
    """Copies of the tensors in the modules' attributes, cut from their graphs, by id: a memo for `copy.deepcopy`."""
    memo: dict[int, Any] = {}
    for module in network.modules():
        _remember([value for key, value in vars(module).items() if key != "_modules"], memo)
    return memo


def _remember(value: object, memo: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not (value.is_leaf and value.requires_grad) and not is_lazy(value):
            try:
                memo[id(value)] = copy.deepcopy(value.detach())
            except RuntimeError:  # left over from a vmap that has ended: there are no values in it
                memo[id(value)] = None
    elif isinstance(value, list | tuple | set):
        for item in value:
            _remember(item, memo)
    elif isinstance(value, dict):
        _remember(list(value.values()), memo)


class Skeleton:
    """A copy of the user's network whose tensors are placeholders without storage."""

    def __init__(self, network: nn.Module) -> None:
        self.network = copied(network)
        self.parameters, self.buffers = places(self.network)
        self.empty = [
            (module._buffers, key)
            for module in self.network.modules()
            for key, tensor in module._buffers.items()
            if tensor is None
        ]
        self.trainable = {name for name, tensor in self.network.named_parameters() if tensor.requires_grad}
        for where in self.parameters.values():
            self._fill(where, nn.Parameter(self._placeholder(where), requires_grad=False))
        for where in self.buffers.values():
            self._fill(where, self._placeholder(where))

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        memo.update(_kept_tensors(self.network))
        twin = Skeleton.__new__(Skeleton)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @staticmethod
    def _placeholder(where: list[Place]) -> Tensor:
        held, key = where[0]
        tensor = held[key]
        assert tensor is not None  # noqa: S101 - places() lists only what is there
        return torch.empty_like(tensor.detach(), device="meta")

    @staticmethod
    def _fill(where: list[Place], tensor: Tensor) -> None:
        for held, key in where:
            held[key] = tensor

    @property
    def names(self) -> list[str]:
        """All names of a state, parameters first."""
        return [*self.parameters, *self.buffers]

    def shape(self, name: str) -> torch.Size:
        """The shape of one network's tensor of that name."""
        where = self.parameters.get(name) or self.buffers[name]
        return self._placeholder(where).shape

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
        placeholders = [(where, where[0][0][where[0][1]]) for where in self._places_of(state)]
        for (where, _), tensor in zip(placeholders, state.values(), strict=True):
            self._fill(where, tensor)
        entered.contexts.append(partial(self._holding_again, state) if again else None)
        try:
            yield self.network
            self._keep_buffers(state)
        finally:
            entered.contexts.pop()
            if not entered.contexts:
                entered.blocks = 0  # one that raised was not left
            for where, placeholder in placeholders:
                for held, key in where:
                    held[key] = placeholder
            for held, key in self.empty:  # what one member puts there is not for the next
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
            self._fill(where, nn.Parameter(value, requires_grad=name in self.trainable) if is_parameter else value)
        return other.network
