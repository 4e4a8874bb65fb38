"""Comparison of members with their own networks, with the first batch, before an engine is chosen.

An ensemble runs M sets of values through the code of one network. This is right only if the code of every network
computes the same function of its values: no attribute, closure, cache or counter of one network may influence the
outputs of another. So the outputs and buffers of each member in eval and in train mode, and its gradients, are compared
with those of an independent copy of its own network, for the same inputs and the same random state. If they differ,
members run as separate modules, which is a plain loop over copies of the networks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import clone, count_examples, detach, device_of, first_examples
from enfold.engines.attributes import (
    describe_code,
    different_attribute,
    find_changed,
    read_numbers,
    read_tensors,
)
from enfold.engines.call import call_network
from enfold.engines.compare import GRADIENT, OUTPUTS, find_difference
from enfold.engines.examples import EXAMPLES, fix_rng, seed_rng, vary
from enfold.engines.inputs import call_and_watch, record_input_writes
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Place, Skeleton, State, empty_buffers, find_places
from enfold.errors import EnfoldError, SeparateModulesWarning, level_outside


@dataclass(frozen=True)
class Mismatch:
    """The reason why members cannot all run the code of one network.

    Attributes:
        member: The index of a member.
        what: What differs between the member and its network.
        same_code: Whether the networks compute the same function of their values, each with its own copy of the code.
        recomputes: Whether the only reason is activation checkpointing.
    """

    member: int
    what: str
    same_code: bool = False
    recomputes: bool = False

    def __str__(self) -> str:
        return f"{self.what} of member {self.member} would differ from those of its own network"

    def report(self, engine: str) -> None:
        """Warn that members run as separate modules, or raise EnfoldError for an engine that cannot do this."""
        if engine in ("stacked", "vmap"):
            reason = (
                "it uses activation checkpointing, and its values are not available in the backward pass"
                if self.recomputes
                else f"members run the code of one network, and {self}"
            )
            raise EnfoldError(
                f"the engine '{engine}' cannot run this network because {reason}: use engine='loop' or engine='auto'"
            )
        if self.recomputes:
            return  # nothing that the user could change
        warnings.warn(
            f"members run as separate modules, one after the other, because with the code of one network {self}; to "
            "run them together, store the values that differ between them in parameters or buffers",
            SeparateModulesWarning,
            stacklevel=level_outside(),
        )


@dataclass(frozen=True)
class Verification:
    """The result of a comparison.

    Attributes:
        mismatch: The first difference, or None.
        is_complete: Whether members could be compared.
        covers_training: Whether they could be compared in train mode.
    """

    mismatch: Mismatch | None = None
    is_complete: bool = False
    covers_training: bool = False


@dataclass
class Result:
    """One run of a network on the examples: outputs, buffers and gradients by name."""

    tensors: dict[str, Tensor]
    writes_inputs: bool
    written: set[str]  # parameters that the forward pass modifies
    changed: str | None = None  # an attribute or an empty buffer that has another value after the call
    network: nn.Module | None = None  # which has run, if it kept tensors
    kept: State = field(default_factory=dict)  # tensors that the call stored in attributes, by name


def verify(codes: Sequence[Skeleton], state: State, inputs: Any) -> Verification:
    """Compare members that run the code of the first network with their own networks.

    In-place modifications of inputs and parameters, and activation checkpointing, are recorded in the skeletons.

    Args:
        codes: The members' own networks, or one for all members.
        state: The values of all members, each (M, ...).
        inputs: A batch of any structure, which is not modified.

    Returns:
        The first difference, if any, and whether members could be compared at all and in train mode.

    Raises:
        EnfoldError: If members differ from their own networks even as separate modules, or use tensors of the networks
            from which they were copied.
    """
    size = count_examples(inputs)
    few = None if size is None else min(EXAMPLES, size)  # None: all examples
    for rows, kind in dict.fromkeys([(few, "varied"), (few, "given"), (size, "varied"), (size, "given")]):
        examples = detach(inputs if rows is None else first_examples(inputs, rows))
        # Warnings of the network are shown when the ensemble runs it.
        quiet = warnings.catch_warnings(action="ignore")
        with torch.inference_mode(False), torch.enable_grad(), quiet, fix_rng(inputs):
            try:
                comparison = _Comparison(codes, state, clone(examples), is_varied=kind == "varied")
            except EnfoldError:
                raise
            except Exception:  # noqa: S112 - the network does not accept this number of rows, these values or inputs
                continue
            covers = all(result is not None for result in comparison.trained)
            if covers or rows == size:
                return Verification(comparison.find_mismatch(), True, covers or size is None or size > 1)
    return Verification()


def separate(codes: Sequence[Skeleton], num_members: int) -> list[Skeleton]:
    """Return one private skeleton for every member."""
    own = list(codes) if len(codes) == num_members else [copy.deepcopy(codes[0]) for _ in range(num_members)]
    for code in own:
        code.is_private = True
    return own


def find_recomputation(code: Skeleton, state: Mapping[str, Tensor], inputs: Any) -> None:
    """Record in a skeleton whether its network uses activation checkpointing, unless this is known.

    A forward pass is run, then the values are removed and a backward pass is run: it fails if a block is run again.

    Args:
        code: The skeleton.
        state: The values of one member.
        inputs: A batch, of which a few examples are used.
    """
    if code.recomputes is not None:
        return
    twin = copy.deepcopy(code)
    values = {name: _copy_contiguous(tensor.detach()) for name, tensor in state.items()}
    for name in code.trainable & values.keys():
        values[name].requires_grad_()
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(action="ignore"), fix_rng(inputs):
        try:
            with twin.use_values(values) as network:
                few = first_examples(inputs, EXAMPLES)
                outputs = get_logits(call_network(network, clone(detach(inputs if few is None else few))), network)
        except Exception:  # the network does not accept so few rows
            return
        code.is_reentrant = any(_is_reentrant(node) for node in _walk_graph(outputs))
        try:
            if outputs.requires_grad:
                outputs.abs().sum().backward()
            code.recomputes = False
        except Exception:
            code.recomputes = True


def _is_reentrant(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"


class _Comparison:
    """Examples, values, and the results of the members' own networks for them."""

    def __init__(self, codes: Sequence[Skeleton], state: State, rows: Any, *, is_varied: bool) -> None:
        members = len(next(iter(state.values())))
        self.are_identical = _are_identical(codes)
        if self.are_identical:
            members = min(members, 2)  # two members show whether the one code carries anything from member to member
        self.codes = [codes[index if len(codes) > 1 else 0] for index in range(members)]
        self.others = codes[members:]  # which are identical to those
        self.rows = rows
        # In the memory layout of the own networks, because the random numbers of dropout follow the layout.
        given = {name: tensor.detach()[:members].contiguous() for name, tensor in state.items()}
        self.values = vary(given, codes[0].parameters) if is_varied else given
        self.evaluated = [self._run_own_network(index, training=False) for index in range(members)]
        if is_varied and not all(bool(torch.isfinite(one.tensors[OUTPUTS]).all()) for one in self.evaluated):
            raise ValueError("varied values are not in the domain of the network")
        self.trained = [self._try_to_train(index) for index in range(members)]
        for code, *results in zip(self.codes, self.evaluated, self.trained, strict=True):
            for training, result in enumerate(results):
                if result is not None:
                    self._record(code, bool(training), result)
        for code in self.others:
            for training, result in enumerate((self.evaluated[0], self.trained[0])):
                if result is not None:
                    self._record(code, bool(training), result)

    def _record(self, code: Skeleton, training: bool, result: Result) -> None:
        record_input_writes(code.network, training, result.writes_inputs)
        code.written |= result.written

    def _try_to_train(self, index: int) -> Result | None:
        try:
            return self._run_own_network(index, training=True)
        except EnfoldError:
            raise
        except Exception:  # a batch that is too small, or a network that takes other arguments in train mode
            return None

    def find_mismatch(self) -> Mismatch | None:
        """Return the first difference; raises EnfoldError if even separate modules differ from their networks."""
        found = self._find_first(lambda index: 0)
        if found is not None and self._find_recomputation():
            found = self._find_first(lambda index: 0)
            if found is None:
                return self._compare_settings() or Mismatch(0, "the gradients", same_code=True, recomputes=True)
        if found is None:
            return self._compare_settings() or self._find_cache()
        reason = self._find_first(lambda index: index)
        if reason is not None and self._is_reproducible(reason[0]):
            raise EnfoldError(
                f"members must compute the same as their own networks, but {reason[1]} of member {reason[0]} differ, "
                f"even as separate modules: store everything that the forward pass of "
                f"{type(self.codes[0].network).__name__} uses in parameters, buffers or attributes of its modules"
            )
        same_code = self._find_first(lambda index: 0, fresh=True) is None
        return Mismatch(*found, same_code=same_code)

    def _find_recomputation(self) -> bool:
        """Return whether a network uses activation checkpointing, and record it in all skeletons."""
        for index, code in enumerate(self.codes):
            find_recomputation(code, self._values_of(index), self.rows)
        if not any(code.recomputes for code in self.codes):
            return False
        reentrant = any(code.is_reentrant for code in self.codes)
        for code in (*self.codes, *self.others):
            code.recomputes, code.is_reentrant = True, reentrant
        return True

    def _compare_settings(self) -> Mismatch | None:
        """Return differences in attributes, and attributes that change from call to call and so between members."""
        different = None if self.are_identical else different_attribute(self.codes)
        if different is not None:
            return Mismatch(different[0], f"the attribute '{different[1]}'", same_code=True)
        results = [result for result in (*self.evaluated, *self.trained) if result is not None]
        changed = next((result.changed for result in results if result.changed is not None), None)
        if changed is not None and len(self.codes) > 1 and self.codes[0] is not self.codes[1]:
            return Mismatch(1, f"'{changed}', which every call changes,", same_code=True)
        return None

    def _find_cache(self) -> Mismatch | None:
        """Return a tensor that a call in eval mode computes from a member's values and that the next call uses.

        Its effect on the outputs may be below the tolerance now and above it for other values, so it is replaced by
        NaN. Features that a call stores, and caches of constants, have no effect or are equal for all members.
        """
        first, *others = self.evaluated
        differ = {
            name
            for name, tensor in first.kept.items()
            for other in others
            if name in other.kept and not torch.equal(tensor, other.kept[name])
        }
        if first.network is None or not differ:
            return None
        places = read_tensors(first.network)
        for name in differ:
            container, key = places[name]
            container[key] = torch.full_like(container[key], float("nan"))
        if bool(self._evaluate(first.network).isnan().any()) and not bool(first.tensors[OUTPUTS].isnan().any()):
            return Mismatch(1, f"'{min(differ)}', which a call computes and the next one uses,", same_code=True)
        return None

    def _find_first(self, code_of: Callable[[int], int], *, fresh: bool = False) -> tuple[int, str] | None:
        """Run every member with the code of member `code_of(index)`, a new copy of it for each one if `fresh`."""
        for training in (False, True):
            twins: dict[int, Skeleton] = {}
            for index in range(len(self.codes)):
                which = code_of(index)
                if which not in twins or fresh:
                    twins[which] = copy.deepcopy(self.codes[which])
                    twins[which].network.train(training)
                what = self._compare_member(twins[which], index, training)
                if what is not None:
                    return index, f"{what} in {'train' if training else 'eval'} mode"
        return None

    def _compare_member(self, code: Skeleton, index: int, training: bool) -> str | None:
        expected = self.trained[index] if training else self.evaluated[index]
        if expected is None:
            return None
        values = {name: _copy_contiguous(tensor) for name, tensor in self._values_of(index).items()}
        for name in code.trainable & values.keys():
            values[name].requires_grad_()
        try:
            with code.use_values(values) as network:
                parameters, buffers = find_places(network)  # not always `code.network`
                outputs, found = self._run_forward(network, {**parameters, **buffers}, training)
            # Behind the block, where the values have been removed: a checkpointed block would need them.
            found.tensors |= _compute_gradients(outputs, values) if training else {}
        except Exception as error:  # of the user's own forward
            return f"the errors ({type(error).__name__}: {error})"
        return find_difference(expected.tensors, found.tensors)

    def _is_reproducible(self, index: int) -> bool:
        """Return whether copies of a network give equal results; not if it has a random generator of its own."""
        for training, expected in ((False, self.evaluated[index]), (True, self.trained[index])):
            for _ in range(2 if expected is not None else 0):
                again = self._run_own_network(index, training=training)
                if find_difference(expected.tensors, again.tensors) is not None:  # type: ignore[union-attr]
                    return False
        return True

    def _values_of(self, index: int) -> State:
        return {name: tensor[index] for name, tensor in self.values.items()}

    def _run_own_network(self, index: int, *, training: bool) -> Result:
        code = self.codes[index]
        network = code.materialise(self._values_of(index)).train(training)
        parameters, buffers = find_places(network)
        places, before = {**parameters, **buffers}, read_numbers(network)
        leaves = {name: _read(places[name]) for name in parameters}
        known = set() if training else {id(container[key]) for container, key in read_tensors(network).values()}
        outputs, result = self._run_forward(network, places, training)
        _refuse_originals(outputs, code)
        if not training:
            self._refuse_views(code, index, outputs)
            kept = {name: container[key] for name, (container, key) in read_tensors(network).items()}
            result.kept = {name: tensor.detach() for name, tensor in kept.items() if id(tensor) not in known}
            result.network = network if result.kept else None
        result.tensors |= _compute_gradients(outputs, leaves) if training else {}
        after = read_numbers(network)
        if before != after:  # a size that every call sets to the same value is no change
            self._evaluate(network)
            if network.training != training:
                network.train(training)
            changed = find_changed(after, read_numbers(network))
            result.changed = None if changed is None else ".".join(filter(None, changed))
        filled = set(empty_buffers(code.network)) - set(empty_buffers(network)) if code.empty else set()
        if training and filled and not torch.equal(self._evaluate(network), self._evaluate(network, without=filled)):
            result.changed = min(filled)
        return result

    def _refuse_views(self, code: Skeleton, index: int, outputs: Tensor) -> None:
        """Raise EnfoldError if outputs depend on an attribute that was a view of a parameter in the original network.

        Not if every call sets the attribute, as `torch.nn.utils.spectral_norm` does.
        """
        for name, parameter in code.views.items():
            network = code.materialise(self._values_of(index))
            path, _, key = name.rpartition(".")
            module = network.get_submodule(path)
            setattr(module, key, torch.full_like(getattr(module, key).detach(), float("nan")))
            if bool(self._evaluate(network).isnan().any()) and not bool(outputs.isnan().any()):
                raise EnfoldError(
                    f"a copy of a network must not use the original, but the attribute '{name}' of "
                    f"{type(code.network).__name__} is a view of the parameter '{parameter}', which the attribute of a "
                    "copy does not follow: make the view in the forward pass"
                )

    def _evaluate(self, network: nn.Module, without: Collection[str] = ()) -> Tensor:
        """Return the outputs of a network in eval mode, after some of its buffers were set to None."""
        for name in without:
            path, _, key = name.rpartition(".")
            network.get_submodule(path)._buffers[key] = None
        seed_rng(device_of(self.rows))
        with torch.no_grad():
            if network.training:  # `eval` may empty a cache
                network.eval()
            return get_logits(call_network(network, clone(self.rows)), network)

    def _run_forward(
        self, network: nn.Module, places: Mapping[str, list[Place]], training: bool
    ) -> tuple[Tensor, Result]:
        """Run a network with values at these places on the examples; return its outputs, with a graph in train mode."""
        parameters, buffers = self.codes[0].parameters, self.codes[0].buffers
        versions = {name: _read(places[name])._version for name in parameters}
        seed_rng(device_of(self.rows))
        with torch.set_grad_enabled(training):
            output, writes_inputs = call_and_watch(network, self.rows)
            outputs = get_logits(output, network)
        tensors = {OUTPUTS: outputs.detach()}
        tensors |= {f"the buffer '{name}'": _read(places[name]).detach().clone() for name in buffers}
        written = {name for name in parameters if _read(places[name])._version != versions[name]}
        return outputs, Result(tensors, writes_inputs, written)


def _are_identical(codes: Sequence[Skeleton]) -> bool:
    """Return whether the networks are known to be the same code, without running them."""
    if len(codes) == 1:
        return True
    first = describe_code(codes[0].network)
    return first is not None and all(describe_code(code.network) == first for code in codes[1:])


def _read(where: Sequence[Place]) -> Tensor:
    tensors, key = where[0]
    tensor = tensors[key]
    if tensor is None:
        raise ValueError(f"the forward pass removed '{key}'")
    return tensor


def _walk_graph(outputs: Tensor) -> list[Any]:
    """Return all nodes of the autograd graph."""
    waiting, seen = [outputs.grad_fn], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting.extend(function for function, _ in node.next_functions)
    return list(seen)


def _refuse_originals(outputs: Tensor, code: Skeleton) -> None:
    """Raise EnfoldError if the outputs of a copy have a gradient for a parameter of the network that was copied."""
    for node in _walk_graph(outputs):
        name = code.name_of_original(getattr(node, "variable", None))
        if name is not None:
            raise EnfoldError(
                f"a copy of a network must not use the original, but that of {type(code.network).__name__} uses its "
                f"parameter '{name}', perhaps by a function or an object that refers to the network: look it up in "
                "the forward pass"
            )


def _copy_contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _compute_gradients(outputs: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of the outputs."""
    leaves = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    if not outputs.requires_grad or not leaves:
        return {}
    real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
    weights = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).to(real) + 0.5
    real.backward(weights)  # not autograd.grad, which reentrant checkpointing does not support
    return {
        f"{GRADIENT}'{name}'": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()
        for name, leaf in leaves.items()
    }
