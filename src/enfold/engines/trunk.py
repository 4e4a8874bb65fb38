"""One pass over a common trunk: an engine for members that differ only from some layer on.

In the pass of the first member the outputs of common modules are recorded, until a tensor is read that each member has
of its own. In the passes of the other members these modules return the recorded outputs, in the same order. Operations
between modules are computed again, which is cheap. This needs no graph of the network, so its forward may contain any
Python code: a pass that calls other modules than the first one runs without the record from there on. A training step
of the 32-64-128 network with M = 4 and a trunk of half of the layers takes 0.50 of the time of the loop.
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
from enfold.engines.call import call_network
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State

PLAIN = (Tensor, type(None), bool, int, float, str)  # types of recorded outputs


class OneTrunk:
    """An engine that runs the trunk once, then the branch of every member; for own inputs it runs the loop."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton = skeleton
        self.loop = OneByOne(skeleton)
        self.owned, common = _split_modules(skeleton, own)
        self.forwards = [(module, vars(module).get("forward"), self._make_forward(module)) for module in common]
        self.intact: set[nn.Module] = set()  # modules whose outputs are not modified in place, so not copied
        self.record = Record(self.intact)
        self.names = list(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> OneTrunk:
        return OneTrunk(copy.deepcopy(self.skeleton, memo), self.names)

    def _make_forward(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.record.run(module, forward, args, kwargs)

        return run

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: self.loop.slice(name, tensor) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        compiled = self.skeleton.network._compiled_call_impl is not None or torch.compiler.is_dynamo_compiling()
        if each or compiled or num_members == 1:  # compiled code does not use a replaced forward
            return self.loop(state, inputs, each)
        self.record = Record(self.intact)
        outputs = []
        try:
            with self._replace_forwards():
                for index in range(num_members):
                    values = {name: tensors[index] for name, tensors in slices.items()}
                    outputs.append(self._run_member(values, self.loop.prepare(inputs)))
                    self.record.rewind()
        finally:
            self.record = Record(self.intact)  # releases the activations
        return torch.stack(outputs)

    def _run_member(self, values: State, inputs: Any) -> Tensor:
        with self.skeleton.use_values(values) as network, _watch_reads(self.owned, self.record):
            return get_logits(call_network(network, inputs), network)

    @contextmanager
    def _replace_forwards(self) -> Iterator[None]:
        """Let the common modules record or repeat their outputs inside the block."""
        try:
            for module, _, forward in self.forwards:
                vars(module)["forward"] = forward
            yield
        finally:
            for module, before, _ in self.forwards:
                if before is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = before


class OneByOne(Loop):
    """A loop in which a batch updates the statistics of a common batch norm once, as one pass over the trunk does."""

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        if each:
            return super().__call__(state, inputs, each)
        self.check_reentrant(state)
        outputs = []
        for index in range(len(next(iter(state.values())))):
            values = {name: tensor[index] for name, tensor in state.items()}
            if index:
                values |= self.own_statistics(state, values)
            with self.code(index).use_values(values) as network:
                outputs.append(get_logits(call_network(network, self.prepare(inputs)), network))
        return torch.stack(outputs)

    def own_statistics(self, state: State, values: State) -> State:
        """Return copies of the buffers that are common to all members, for a pass that must not update them."""
        return {name: values[name].clone() for name in self.skeleton.buffers if not state[name].stride(0)}


class Record:
    """The outputs of common modules in the first pass, in order, and the position of the current pass in them."""

    def __init__(self, intact: set[nn.Module]) -> None:
        self.intact = intact
        self.entries: list[Entry] = []
        self.position = 0
        self.first = True
        self.open = True  # whether the pass is still in the trunk
        self.inside = False  # whether a common module runs, whose submodules are not recorded

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a common module, or return its output of the first pass.

        Args:
            module: The module.
            forward: Its forward function.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        if self.inside or not self.open:
            return forward(*args, **kwargs)
        if self.first:
            return self._record(module, forward, args, kwargs)
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        if entry is None or entry.module is not module or not entry.is_intact():
            self.open = False
            return forward(*args, **kwargs)
        self.position += 1
        return entry.get(copies=module not in self.intact)

    def _record(
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
        return entry.get(copies=module not in self.intact)

    def rewind(self) -> None:
        """End a pass; after the first one, find the modules whose outputs are modified in place and must be copied."""
        if self.first:
            modified = {entry.module for entry in self.entries if entry.was_modified()}
            self.intact |= {entry.module for entry in self.entries}
            self.intact -= modified
        self.first, self.open, self.position = False, True, 0


class Entry:
    """One call of a module: its output, and the tensors that the network got."""

    def __init__(self, module: nn.Module, output: Any) -> None:
        self.module = module
        self.spec = None if isinstance(output, Tensor) else tree_flatten(output)[1]
        self.leaves: list[Any] = [output] if self.spec is None else tree_flatten(output)[0]
        self.repeatable = all(isinstance(leaf, PLAIN) for leaf in self.leaves)
        self.versions = _versions(self.leaves)
        self.given: list[Any] | None = None  # the tensors that the network got in the first pass
        self.given_versions: list[int] = []

    def is_intact(self) -> bool:
        """Return whether the recorded tensors were not modified."""
        return _versions(self.leaves) == self.versions

    def get(self, *, copies: bool) -> Any:
        """Return the output for one member."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves] if copies else self.leaves
        if self.given is None:
            self.given, self.given_versions = leaves, _versions(leaves)
        return leaves[0] if self.spec is None else tree_unflatten(leaves, self.spec)

    def was_modified(self) -> bool:
        """Return whether the network modified the output in the first pass in place, and release it."""
        modified = _versions(self.given or []) != self.given_versions
        self.given = []
        return modified


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


Owned = list[tuple[nn.Module, str, set[str]]]  # a module, the name of one of its dictionaries, the own keys in it


class Tripwire(dict[str, Any]):
    """A dictionary of parameters or buffers that calls `spring` when one of the members' own tensors is read."""

    def __init__(self, tensors: dict[str, Any], own: set[str], spring: Callable[[], None]) -> None:
        super().__init__(tensors)
        self.tensors, self.own, self.spring = tensors, own, spring

    def __getitem__(self, key: str) -> Any:
        if key in self.own:
            self.spring()
        return self.tensors[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.spring()
        self.tensors[key] = value

    def items(self) -> Any:
        """Return all items, so also the members' own."""
        self.spring()
        return self.tensors.items()

    def values(self) -> Any:
        """Return all values, so also the members' own."""
        self.spring()
        return self.tensors.values()


@contextmanager
def _watch_reads(owned: Owned, record: Record) -> Iterator[None]:
    """End the trunk when a member's own tensor is first read, by its module or by another one."""
    originals = [vars(module)[which] for module, which, _ in owned]

    def spring() -> None:
        record.open = False
        for (module, which, _), original in zip(owned, originals, strict=True):
            vars(module)[which] = original

    for (module, which, keys), original in zip(owned, originals, strict=True):
        vars(module)[which] = Tripwire(original, keys, spring)
    try:
        yield
    finally:
        spring()


def _split_modules(skeleton: Skeleton, own: Collection[str]) -> tuple[Owned, list[nn.Module]]:
    """Return the places of the members' own tensors, and the modules that have none in them."""
    every = {**skeleton.parameters, **skeleton.buffers}
    keys: dict[int, set[str]] = {}
    for name in own:
        for tensors, key in every[name]:
            keys.setdefault(id(tensors), set()).add(key)
    owned: Owned = [
        (module, which, keys[id(vars(module)[which])])
        for module in skeleton.network.modules()
        for which in ("_parameters", "_buffers")
        if id(vars(module)[which]) in keys
    ]
    owners = {module for module, _, _ in owned}
    modules = skeleton.network.modules()
    return owned, [module for module in modules if owners.isdisjoint(module.modules())]
