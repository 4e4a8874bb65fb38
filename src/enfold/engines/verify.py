"""Members compared with their own networks, before the first batch decides how they are run.

An ensemble runs M sets of values through the code of one network. That is right only if every network's own code does
the same with its values: no attribute, closure, cache or memory of one network may decide about another's outputs. So
each member's outputs and buffers in eval and in train mode, and its gradients, are compared with those of an
independent copy of its own network, for the same examples and the same random state. Where they differ, members run as
separate modules, which is a plain loop over copies of the networks.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from enfold.engines.attributes import attributes, first_difference, numbers
from enfold.engines.outputs import logits_of
from enfold.engines.skeleton import Skeleton, State, empty_buffers, read_state
from enfold.engines.trial import EXAMPLES, same_draws, varied
from enfold.errors import EnfoldError, SeparateModulesWarning, level_outside

OUTPUTS = "the outputs"
TOLERANCE = 1e-4  # relative to the largest value of a tensor; gradients have ten times as much


@dataclass(frozen=True)
class Mismatch:
    """Why members cannot all run by the code of one network."""

    member: int
    what: str
    same_code: bool = False  # whether they compute the same function of their values, each by a copy of its own

    def __str__(self) -> str:
        return f"{self.what} of member {self.member} would differ from its own network's"

    def report(self, engine: str) -> None:
        """Warn that members run as separate modules, or refuse an engine that cannot."""
        if engine in ("stacked", "vmap"):
            raise EnfoldError(
                f"the engine '{engine}' runs all members by the code of one network, but {self}: use engine: auto"
            )
        warnings.warn(
            f"members run as separate modules, one after the other, because by the code of one network {self}; to run "
            "them together, keep what differs between them in parameters or buffers",
            SeparateModulesWarning,
            stacklevel=level_outside(),
        )


@dataclass(frozen=True)
class Verification:
    """What a comparison found."""

    mismatch: Mismatch | None = None
    is_complete: bool = False  # whether members could be compared at all
    covers_training: bool = False  # whether they could be compared in train mode


@dataclass
class Result:
    """What one network gave for the examples: outputs, buffers and gradients by name."""

    tensors: dict[str, Tensor]
    writes_inputs: bool
    written: set[str]  # parameters that the forward pass changes
    changed: str | None  # an attribute or an empty buffer that the pass leaves otherwise than it was


def verify(codes: Sequence[Skeleton], state: State, inputs: Tensor) -> Verification:
    """Compare members that run the code of the first network with their own networks.

    What is learned about the code is noted in it: whether it works in place on its inputs or on parameters.

    Args:
        codes: The members' own networks; one that stands for all members where they share their code.
        state: All members' values, each (M, ...).
        inputs: A batch (B, ...), which is left as it is.

    Returns:
        What differs, if anything, and whether members could be compared at all and in train mode.

    Raises:
        EnfoldError: If members differ from their own networks even as separate modules, or use tensors of the networks
            that they were made from.
    """
    few = min(EXAMPLES, len(inputs))
    for rows, kind in dict.fromkeys([(few, "varied"), (few, "given"), (len(inputs), "varied"), (len(inputs), "given")]):
        # What a network warns of, it warns of when it is run.
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            try:
                comparison = _Comparison(codes, state, inputs[:rows].detach().clone(), is_varied=kind == "varied")
            except EnfoldError:
                raise
            except Exception:  # noqa: S112 - it does not take so few rows, such values, or such inputs
                continue
            covers = all(result is not None for result in comparison.trained)
            if covers or rows == len(inputs):
                return Verification(comparison.mismatch(), True, covers or len(inputs) > 1)
    return Verification()


def separate(codes: Sequence[Skeleton], num_members: int) -> list[Skeleton]:
    """Return one network's code for every member, which keeps what its own calls leave behind."""
    own = list(codes) if len(codes) == num_members else [copy.deepcopy(codes[0]) for _ in range(num_members)]
    for code in own:
        code.forgets = False
    return own


def different_attribute(codes: Sequence[Skeleton]) -> tuple[int, str] | None:
    """Return the first member whose network has other settings than the first one's, and the attribute's name."""
    first = attributes(codes[0].network)
    for index, code in enumerate(codes[1:], 1):
        name = first_difference(first, attributes(code.network))
        if name is not None:
            return index, name
    return None


class _Comparison:
    """Examples, values, and what the members' own networks give for them."""

    def __init__(self, codes: Sequence[Skeleton], state: State, rows: Tensor, *, is_varied: bool) -> None:
        members = len(next(iter(state.values())))
        if len(codes) == 1:
            members = min(members, 2)  # one code for all: what it carries from one member to the next, two show
        self.codes = [codes[index if len(codes) > 1 else 0] for index in range(members)]
        self.rows = rows
        given = {name: tensor.detach()[:members].clone() for name, tensor in state.items()}
        self.values = varied(given, set(codes[0].parameters)) if is_varied else given
        self.evaluated = [self._of_own_network(index, training=False) for index in range(members)]
        if is_varied and not all(bool(torch.isfinite(one.tensors[OUTPUTS]).all()) for one in self.evaluated):
            raise ValueError("varied values are outside of what the network can compute")
        self.trained = [self._if_it_trains(index) for index in range(members)]
        for code, *results in zip(self.codes, self.evaluated, self.trained, strict=True):
            for result in results:
                if result is not None:
                    code.writes_inputs |= result.writes_inputs
                    code.written |= result.written

    def _if_it_trains(self, index: int) -> Result | None:
        try:
            return self._of_own_network(index, training=True)
        except EnfoldError:
            raise
        except Exception:  # a batch that is too small, or a network that takes something else in train mode
            return None

    def mismatch(self) -> Mismatch | None:
        """Return the first difference; if even separate modules differ, refuse the networks."""
        found = self._first_mismatch(lambda index: 0)
        if found is None:
            return self._different_settings()
        reason = self._first_mismatch(lambda index: index)
        if reason is not None and self._is_reproducible(reason[0]):
            raise EnfoldError(
                f"members must do what their own networks do, but {reason[1]} of member {reason[0]} differ, even as "
                f"separate modules: keep what the forward pass of {type(self.codes[0].network).__name__} uses in "
                "parameters, buffers or attributes of its modules"
            )
        same_code = self._first_mismatch(lambda index: 0, afresh=True) is None
        return Mismatch(*found, same_code=same_code)

    def _different_settings(self) -> Mismatch | None:
        """Settings that no example showed, and what changes from call to call and so from member to member."""
        different = different_attribute(self.codes)
        if different is not None:
            return Mismatch(different[0], f"the attribute '{different[1]}'", same_code=True)
        results = [result for result in (*self.evaluated, *self.trained) if result is not None]
        changed = next((result.changed for result in results if result.changed is not None), None)
        if changed is not None and len(self.codes) > 1 and self.codes[0] is not self.codes[1]:
            return Mismatch(1, f"'{changed}', which every call changes,", same_code=True)
        return None

    def _first_mismatch(self, code_of: Callable[[int], int], *, afresh: bool = False) -> tuple[int, str] | None:
        """Run every member by the code that `code_of` names, which all members with it share, unless `afresh`."""
        for training in (False, True):
            twins: dict[int, Skeleton] = {}
            for index in range(len(self.codes)):
                which = code_of(index)
                if which not in twins or afresh:
                    twins[which] = copy.deepcopy(self.codes[which])
                    twins[which].network.train(training)
                what = self._difference(twins[which], index, training)
                if what is not None:
                    return index, f"{what} in {'train' if training else 'eval'} mode"
        return None

    def _difference(self, code: Skeleton, index: int, training: bool) -> str | None:
        expected = self.trained[index] if training else self.evaluated[index]
        if expected is None:
            return None
        # Laid out as in the own network: the draws of dropout follow the layout.
        values = {name: _contiguous(tensor) for name, tensor in self._values_of(index).items()}
        for name in code.trainable & values.keys():
            values[name].requires_grad_()
        try:
            with code.holding(values) as network:
                found = self._result(network, training)
        except Exception as error:  # of the user's own forward
            return f"the errors ({type(error).__name__}: {error})"
        return difference(expected.tensors, found.tensors)

    def _is_reproducible(self, index: int) -> bool:
        """Tell whether copies of a network give the same; not if it draws from a source of its own, or others draw."""
        for training, expected in ((False, self.evaluated[index]), (True, self.trained[index])):
            for _ in range(2 if expected is not None else 0):
                if difference(expected.tensors, self._of_own_network(index, training=training).tensors) is not None:  # type: ignore[union-attr]
                    return False
        return True

    def _values_of(self, index: int) -> State:
        return {name: tensor[index] for name, tensor in self.values.items()}

    def _of_own_network(self, index: int, *, training: bool) -> Result:
        code = self.codes[index]
        network = code.materialise(self._values_of(index)).train(training)
        before = numbers(network)
        result = self._result(network, training, code)
        after = numbers(network)
        if first_difference(before, after) is not None:  # a size that is noted again in every call changes nothing
            self._outputs(network)
            result.changed = first_difference(after, numbers(network))
        filled = set(empty_buffers(code.network)) - set(empty_buffers(network))
        if training and filled and not torch.equal(self._outputs(network), self._outputs(network, without=filled)):
            result.changed = min(filled)
        return result

    def _outputs(self, network: nn.Module, without: Collection[str] = ()) -> Tensor:
        """Return what a network gives in eval mode, after some of its buffers were emptied."""
        for name in without:
            path, _, key = name.rpartition(".")
            network.get_submodule(path)._buffers[key] = None
        with fixed_draws(self.rows), torch.no_grad():
            return logits_of(network.eval()(self.rows.clone()))

    def _result(self, network: nn.Module, training: bool, own: Skeleton | None = None) -> Result:
        """Run a network on the examples; gradients are those of a weighted sum of the outputs, in train mode."""
        before, rows = read_state(network), self.rows.clone()
        versions, entered = {name: tensor._version for name, tensor in before.items()}, rows._version
        with fixed_draws(rows), torch.set_grad_enabled(training):
            outputs, after = logits_of(network(rows)), read_state(network)
            tensors = {OUTPUTS: outputs.detach()}  # and buffers before a checkpointed block is run again
            tensors |= {f"the buffer '{name}'": after[name].detach().clone() for name in self.codes[0].buffers}
            if own is not None:
                _refuse_originals(outputs, own)
            gradients = _gradients(outputs, before) if training else {}
        written = {name for name in self.codes[0].parameters if after[name]._version != versions[name]}
        return Result({**tensors, **gradients}, rows._version != entered, written, None)


def _refuse_originals(outputs: Tensor, code: Skeleton) -> None:
    """Refuse a copy whose outputs have a gradient for a parameter of the network that it was made from."""
    waiting, seen = [outputs.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = code.name_of_original(getattr(node, "variable", None))
        if name is not None:
            raise EnfoldError(
                f"a copy of a network must not use the original, but that of {type(code.network).__name__} uses its "
                f"parameter '{name}', perhaps by a function or an object that refers to the network: look it up when "
                "it is used"
            )
        waiting.extend(function for function, _ in node.next_functions)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _gradients(outputs: Tensor, state: State) -> dict[str, Tensor]:
    leaves = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    if not outputs.requires_grad or not leaves:
        return {}
    real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
    weights = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).to(real) + 0.5
    found = torch.autograd.grad((real * weights).sum(), list(leaves.values()), allow_unused=True)
    return {
        f"the gradients of '{name}'": torch.zeros_like(leaf) if grad is None else grad.to_dense()
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that differs by more than rounding, or None.

    Args:
        expected: Tensors by name; gradients among them share one scale.
        found: Tensors under the same names.
    """
    device = expected[OUTPUTS].device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else expected[OUTPUTS].dtype
    tolerance = max(TOLERANCE, torch.finfo(kind).eps)
    sizes = [_largest(tensor) for name, tensor in expected.items() if name.startswith("the gradients")]
    floor = 0.1 * max(sizes, default=0.0)  # a bias before a batch norm has a gradient of rounding alone
    for name, tensor in expected.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            return name
        is_gradient = name.startswith("the gradients")
        scale = max(_largest(tensor), floor if is_gradient else 1e-6)
        allowed = (10 if is_gradient else 1) * tolerance * scale
        if not torch.allclose(other, tensor, rtol=0.0, atol=allowed, equal_nan=True):
            return name
    return None


def _largest(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() or tensor.is_complex() else tensor
    return float(finite.abs().max()) if finite.numel() and finite.dtype != torch.bool else 0.0


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of one device; `torch.manual_seed` notes the stack for devices without use."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def fixed_draws(inputs: Tensor) -> Iterator[None]:
    """Draw the same random numbers in every such block, from torch, numpy and Python, and leave their states alone."""
    before = random.getstate(), np.random.get_state()
    with same_draws(inputs):
        _seed(inputs.device, 0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
