"""One pass over a shared trunk: an engine for members that differ only from some layer on.

In the first member's pass it is noted what shared modules return, until a tensor that members own is first read. In the
passes of the other members these modules are not run: they return what was noted, in the same order. What a network
computes between its modules is computed again, which is cheap. No graph of the network is needed, so any Python in its
forward is welcome: where a pass takes another way than the first, it runs on its own from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from enfold.engines.base import Loop
from enfold.engines.outputs import logits_of
from enfold.engines.recompute import entered
from enfold.engines.skeleton import Skeleton, State

PLAIN = (Tensor, type(None), bool, int, float, str)  # what an output may be made of to be handed out again


class OneTrunk:
    """The trunk once, then every member's branch; each member's own inputs go through the plain loop."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton = skeleton
        self.loop = OneByOne(skeleton)
        self.owned, shared = _divided(skeleton, own)
        self.forwards = [(module, vars(module).get("forward"), self._noting(module)) for module in shared]
        self.intact: set[nn.Module] = set()  # whose outputs nobody alters in place, so that no copy is needed
        self.record = Record(self.intact)
        self.names = list(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> OneTrunk:
        return OneTrunk(copy.deepcopy(self.skeleton, memo), self.names)

    def _noting(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            return self.record.run(module, forward, args, kwargs)

        return noting

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: self.loop.slices(name, tensor) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        compiled = self.skeleton.network._compiled_call_impl is not None or torch.compiler.is_dynamo_compiling()
        if each or compiled or num_members == 1:  # compiled code does not see that a forward was replaced
            return self.loop(state, inputs, each)
        self.record = Record(self.intact)
        outputs = []
        try:
            with self._replaced():
                for index in range(num_members):
                    values = {name: tensors[index] for name, tensors in slices.items()}
                    if index and self.record.blocks:
                        values |= self.loop.own_statistics(state, values)
                    outputs.append(self._pass(values, self.loop.given(inputs)))
                    self.record.rewind()
        finally:
            self.record = Record(self.intact)  # activations are not kept beyond the call
        return torch.stack(outputs)

    def _pass(self, values: State, inputs: Tensor) -> Tensor:
        with self.skeleton.holding(values) as network, _watched(self.owned, self.record):
            return logits_of(network(inputs))

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """The shared modules note or repeat their outputs inside the block."""
        try:
            for module, _, noting in self.forwards:
                vars(module)["forward"] = noting
            yield
        finally:
            for module, before, _ in self.forwards:
                if before is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = before


class OneByOne(Loop):
    """A loop in which one batch updates the statistics of a shared batch norm once, as one pass over the trunk does."""

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        if each:
            return super().__call__(state, inputs, each)
        outputs = []
        for index in range(len(next(iter(state.values())))):
            values = {name: tensor[index] for name, tensor in state.items()}
            if index:
                values |= self.own_statistics(state, values)
            with self.code(index).holding(values) as network:
                outputs.append(logits_of(network(self.given(inputs))))
        return torch.stack(outputs)

    def own_statistics(self, state: State, values: State) -> State:
        """Copies of the buffers that members share, for a pass that leaves them as they are."""
        return {name: values[name].clone() for name in self.skeleton.buffers if not state[name].stride(0)}


class Record:
    """What shared modules returned in the first pass, in order, and how far the current pass has come."""

    def __init__(self, intact: set[nn.Module]) -> None:
        self.intact = intact
        self.entries: list[Entry] = []
        self.position = 0
        self.first = True
        self.open = True  # whether the pass is still in the trunk
        self.blocks = False  # whether shared modules were called in a checkpointed block, which runs in every pass
        self.inside = False  # a shared module, whose parts are not noted by themselves

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A shared module is called: run it, or return what it returned in the first pass."""
        if entered.blocks > 0 and not self.inside:
            self.open, self.blocks = False, True  # what a checkpointed block runs again it must have run itself
        if self.inside or not self.open:
            return forward(*args, **kwargs)
        if self.first:
            return self._noted(module, forward, args, kwargs)
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        if entry is None or entry.module is not module or not entry.is_whole():
            self.open = False
            return forward(*args, **kwargs)
        self.position += 1
        return entry.handed_out(copies=module not in self.intact)

    def _noted(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.inside = False
        entry = Entry(module, output)
        if not entry.repeatable:
            self.open = False
        if not self.open:
            return output
        self.entries.append(entry)
        return entry.handed_out(copies=module not in self.intact)

    def rewind(self) -> None:
        """After a pass; the first tells whose outputs were altered in place, and need a copy for every member."""
        if self.first:
            altered = {entry.module for entry in self.entries if entry.was_altered()}
            self.intact |= {entry.module for entry in self.entries}
            self.intact -= altered
        self.first, self.open, self.position = False, True, 0


class Entry:
    """One call of a module: what it returned, and what was handed out in its place."""

    def __init__(self, module: nn.Module, output: Any) -> None:
        self.module = module
        self.spec = None if isinstance(output, Tensor) else tree_flatten(output)[1]
        self.leaves: list[Any] = [output] if self.spec is None else tree_flatten(output)[0]
        self.repeatable = all(isinstance(leaf, PLAIN) for leaf in self.leaves)
        self.versions = _versions(self.leaves)
        self.given: list[Any] | None = None  # what was handed out in the first pass
        self.given_versions: list[int] = []

    def is_whole(self) -> bool:
        """Whether what was noted still has its values."""
        return _versions(self.leaves) == self.versions

    def handed_out(self, *, copies: bool) -> Any:
        """The output, for one member to use."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves] if copies else self.leaves
        if self.given is None:
            self.given, self.given_versions = leaves, _versions(leaves)
        return leaves[0] if self.spec is None else tree_unflatten(leaves, self.spec)

    def was_altered(self) -> bool:
        """Whether the network wrote into what it was given in the first pass, which is then forgotten."""
        altered = _versions(self.given or []) != self.given_versions
        self.given = []
        return altered


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


Owned = list[tuple[nn.Module, str, set[str]]]  # a module, which of its dictionaries, and the members' own keys in it


class Tripwire(dict[str, Any]):
    """A module's dictionary of parameters or buffers, until one of the members' own is read."""

    def __init__(self, held: dict[str, Any], own: set[str], spring: Callable[[], None]) -> None:
        super().__init__(held)
        self.held, self.own, self.spring = held, own, spring

    def __getitem__(self, key: str) -> Any:
        if key in self.own:
            self.spring()
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.spring()
        self.held[key] = value

    def items(self) -> Any:
        """All, so also the members' own."""
        self.spring()
        return self.held.items()

    def values(self) -> Any:
        """All, so also the members' own."""
        self.spring()
        return self.held.values()


@contextmanager
def _watched(owned: Owned, record: Record) -> Iterator[None]:
    """The trunk ends where a tensor of the member's own is first read, whether by its module or by another one."""
    held = [vars(module)[which] for module, which, _ in owned]

    def spring() -> None:
        record.open = False
        for (module, which, _), original in zip(owned, held, strict=True):
            vars(module)[which] = original

    for (module, which, keys), original in zip(owned, held, strict=True):
        vars(module)[which] = Tripwire(original, keys, spring)
    try:
        yield
    finally:
        spring()


def _divided(skeleton: Skeleton, own: Collection[str]) -> tuple[Owned, list[nn.Module]]:
    """Where members' own tensors are held, and the modules that hold none, nor do their parts."""
    every = {**skeleton.parameters, **skeleton.buffers}
    keys: dict[int, set[str]] = {}
    for name in own:
        for held, key in every[name]:
            keys.setdefault(id(held), set()).add(key)
    owned: Owned = [
        (module, which, keys[id(vars(module)[which])])
        for module in skeleton.network.modules()
        for which in ("_parameters", "_buffers")
        if id(vars(module)[which]) in keys
    ]
    owners = {module for module, _, _ in owned}
    modules = skeleton.network.modules()
    return owned, [module for module in modules if owners.isdisjoint(module.modules())]
