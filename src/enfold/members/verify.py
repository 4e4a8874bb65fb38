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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError, SeparateModulesWarning, level_outside
from enfold.members.outputs import logits_of
from enfold.members.skeleton import Skeleton, State, read_state
from enfold.members.trial import EXAMPLES, same_draws, varied

OUTPUTS = "the outputs"
TOLERANCE = 1e-3  # relative to the largest value of a tensor; gradients have ten times as much


@dataclass(frozen=True)
class Mismatch:
    """Where a member does something else than its own network."""

    member: int
    mode: str  # "eval" or "train"
    what: str
    same_code: bool = False  # whether copies of the first network would do: they only must not be one object

    def __str__(self) -> str:
        return f"{self.what} of member {self.member} in {self.mode} mode differ from those of its own network"

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


@dataclass
class Result:
    """What one network gave for the examples: outputs, buffers and gradients by name."""

    tensors: dict[str, Tensor]
    writes_inputs: bool
    written: set[str]  # parameters that the forward pass changes


def verify(codes: Sequence[Skeleton], state: State, inputs: Tensor) -> Mismatch | None:
    """Compare members that run the code of the first network with their own networks.

    What is learned about the code is noted in it: whether it works in place on its inputs or on parameters.

    Args:
        codes: The members' own networks; one that stands for all members where they share their code.
        state: All members' values, each (M, ...).
        inputs: A batch (B, ...), which is left as it is.

    Returns:
        What differs, or None if all members may run the code of the first network.

    Raises:
        EnfoldError: If members differ from their own networks even as separate modules.
    """
    for rows in dict.fromkeys((min(EXAMPLES, len(inputs)), len(inputs))):
        # What a network warns of, it warns of when it is run.
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            try:
                comparison = _Comparison(codes, state, inputs[:rows].detach().clone())
            except Exception:  # noqa: S112 - it does not take so few, or no such inputs: the call that follows raises it
                continue
            return comparison.mismatch()
    return None


def separate(codes: Sequence[Skeleton], num_members: int) -> list[Skeleton]:
    """Return one network's code for every member."""
    return list(codes) if len(codes) == num_members else [copy.deepcopy(codes[0]) for _ in range(num_members)]


class _Comparison:
    """Examples, values, and what the members' own networks give for them."""

    def __init__(self, codes: Sequence[Skeleton], state: State, rows: Tensor) -> None:
        members = len(next(iter(state.values())))
        if len(codes) == 1:
            members = min(members, 2)  # one code for all: what it carries from one member to the next, two show
        self.codes = [codes[index if len(codes) > 1 else 0] for index in range(members)]
        self.rows = rows
        given = {name: tensor.detach()[:members].clone() for name, tensor in state.items()}
        self.values = varied(given, set(codes[0].parameters))
        self.own = [self._of_own_network(index, training=False) for index in range(members)]
        if not all(bool(torch.isfinite(result.tensors[OUTPUTS]).all()) for result in self.own):
            self.values = given  # varied values may be outside of what the network can compute
            self.own = [self._of_own_network(index, training=False) for index in range(members)]
        for code, result in zip(self.codes, self.own, strict=True):
            code.writes_inputs |= result.writes_inputs
            code.written |= result.written

    def mismatch(self) -> Mismatch | None:
        """Return the first difference; if even separate modules differ, refuse the networks."""
        found = self._first_mismatch(lambda twins, index: twins[0])
        if found is None:
            return None
        reason = self._first_mismatch(lambda twins, index: twins[index])
        if reason is not None and self._is_reproducible(reason):
            raise EnfoldError(
                f"members must do what their own networks do, but {reason}, even as separate modules: keep what the "
                f"forward pass of {type(self.codes[0].network).__name__} uses in parameters, buffers or attributes of "
                "its modules"
            )
        same_code = self._first_mismatch(lambda twins, index: copy.deepcopy(twins[0])) is None
        return replace(found, same_code=same_code)

    def _first_mismatch(self, code_of: Callable[[list[Skeleton], int], Skeleton]) -> Mismatch | None:
        for training in (False, True):
            twins = [copy.deepcopy(code) for code in self.codes]
            for twin in twins:
                twin.network.train(training)
            for index in range(len(self.codes)):
                what = self._difference(code_of(twins, index), index, training)
                if what is not None:
                    return Mismatch(index, "train" if training else "eval", what)
        return None

    def _difference(self, code: Skeleton, index: int, training: bool) -> str | None:
        try:
            expected = self._of_own_network(index, training=True) if training else self.own[index]
        except Exception:  # a batch that is too small for train mode: there is nothing to compare with
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

    def _is_reproducible(self, mismatch: Mismatch) -> bool:
        """Tell whether two copies of a network give the same; not if it draws from a source of its own."""
        training = mismatch.mode == "train"
        results = [self._of_own_network(mismatch.member, training=training).tensors for _ in range(2)]
        return difference(*results) is None

    def _values_of(self, index: int) -> State:
        return {name: tensor[index] for name, tensor in self.values.items()}

    def _of_own_network(self, index: int, *, training: bool) -> Result:
        network = self.codes[index].materialise(self._values_of(index)).train(training)
        return self._result(network, training)

    def _result(self, network: nn.Module, training: bool) -> Result:
        """Run a network on the examples; gradients are those of a weighted sum of the outputs, in train mode."""
        before, rows = read_state(network), self.rows.clone()
        versions, entered = {name: tensor._version for name, tensor in before.items()}, rows._version
        with fixed_draws(rows), torch.set_grad_enabled(training):
            outputs, after = logits_of(network(rows)), read_state(network)
            tensors = {OUTPUTS: outputs.detach()}  # and buffers before a checkpointed block is run again
            tensors |= {f"the buffer '{name}'": after[name].detach().clone() for name in self.codes[0].buffers}
            gradients = _gradients(outputs, before) if training else {}
        written = {name for name in self.codes[0].parameters if after[name]._version != versions[name]}
        return Result({**tensors, **gradients}, rows._version != entered, written)


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
    tolerance = max(TOLERANCE, 8 * torch.finfo(kind).eps)
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


@contextmanager
def fixed_draws(inputs: Tensor) -> Iterator[None]:
    """Draw the same random numbers in every such block, from torch, numpy and Python, and leave their states alone."""
    before = random.getstate(), np.random.get_state()
    with same_draws(inputs):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
