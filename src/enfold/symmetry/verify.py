"""Verify groups: with random weights in float64, random permutations must leave the outputs unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from enfold.data.tree import clone, map_tensors, tensors
from enfold.engines.call import call_network
from enfold.engines.skeleton import Skeleton, State
from enfold.symmetry.axes import Group
from enfold.symmetry.candidates import Candidate
from enfold.symmetry.execution import DOUBLE_TYPES, decompose_fused_operations, float64_mode, float_outputs
from enfold.symmetry.permute import apply_orders, permute_state, soft
from enfold.symmetry.tracer import STATISTICS

PROOFS = 6  # a single random order may not reveal a structure
WIDE = 64  # units, from which three random orders spare a unit with less probability than six of four units do
WIDE_PROOFS = 3
TOLERANCE = 1e-9
SCALES = (
    1.0,
    0.3,
    0.05,
    0.0,
)  # of the random weights, 0 is near the network's: the first with finite outputs is used


class VerificationError(Exception):
    """The network does not run in float64, or its outputs with random weights are not finite."""


@dataclass(frozen=True)
class Verifier:
    """A network with random weights and inputs on which groups are tested."""

    skeleton: Skeleton
    state: State
    inputs: Any
    outputs: Tensor
    source: torch.Generator
    variants: tuple[tuple[Any, Tensor], ...] = ()  # other inputs with their outputs

    @staticmethod
    def create(skeleton: Skeleton, state: State, example: Any, source: torch.Generator) -> Verifier:
        """Draw weights at the usual scale, and biases and statistics away from 0 and 1 so that every unit matters.

        Args:
            skeleton: The network without weights.
            state: The weights.
            example: One batch of inputs; taken from the data by default.
            source: The random generator.
        """
        reason: str | None = None
        error: Exception | None = None
        for inputs in _random_inputs(example, source):
            for scale in SCALES:
                drawn = _random_state(skeleton, state, source, scale)
                try:
                    outputs = run(skeleton, drawn, inputs)
                except Exception as raised:  # the network's own code may refuse such values
                    error, reason = raised, reason or (str(raised).strip() or type(raised).__name__).splitlines()[0]
                    break
                if bool(outputs.isfinite().all()):
                    return Verifier(skeleton, drawn, inputs, outputs, source)
        raise VerificationError(reason or "its outputs with random weights are not finite") from error

    def is_invariant(self, groups: Sequence[Group]) -> bool:
        """Return whether random permutations of all these groups together leave the outputs unchanged.

        Groups of two units have a single non-trivial order. To separate two of them that hold only jointly, proof k + 1
        permutes those with bit k in their number. A random order leaves a unit in its place with probability 1 / size,
        so wide groups are permuted in the first proofs only.
        """
        pairs = [index for index, group in enumerate(groups) if group.size == 2]
        numbers = {index: number for number, index in enumerate(pairs, start=1)}
        needed = WIDE_PROOFS if all(group.size >= WIDE for group in groups) else PROOFS
        for proof in range(max(needed, 1 + len(numbers).bit_length())):
            moved = (
                group
                for index, group in enumerate(groups)
                if (proof < WIDE_PROOFS or group.size < WIDE)
                and (not proof or index not in numbers or numbers[index] >> (proof - 1) & 1)
            )
            state = apply_orders(self.state, ((group, self._order(group.size)) for group in moved))
            if not self._same(run(self.skeleton, state, self.inputs)):
                return False
            for inputs, outputs in self.variants:
                if not _is_same(run(self.skeleton, state, inputs), outputs):
                    return False
        return True

    def with_variants(self) -> Verifier:
        """Return the verifier with other masks, too, for networks that branch on them."""
        found = ((inputs, self._run_variant(inputs)) for inputs in _vary_masks(self.inputs))
        return replace(self, variants=tuple((inputs, outputs) for inputs, outputs in found if outputs is not None))

    def _run_variant(self, inputs: Any) -> Tensor | None:
        try:
            outputs = run(self.skeleton, self.state, inputs)
        except Exception:  # the network does not take such a mask
            return None
        return outputs if bool(outputs.isfinite().all()) else None

    def is_invariant_to_matrices(self, groups: Sequence[Group]) -> bool:
        """Return whether random matrices, applied to each axis according to its role, leave the outputs unchanged."""
        state = self.state
        for group in groups:
            noise = torch.randn(group.size, group.size, generator=self.source, dtype=torch.float64)
            matrix = torch.eye(group.size, dtype=torch.float64) + 0.5 * noise / group.size**0.5
            state = soft(state, group, matrix, torch.linalg.inv(matrix))
        try:
            return self._same(run(self.skeleton, state, self.inputs))
        except Exception:  # code of the network may not accept such values
            return False

    def _order(self, size: int) -> Tensor:
        while True:
            order = torch.randperm(size, generator=self.source)
            if not torch.equal(order, torch.arange(size)):
                return order

    def _same(self, outputs: Tensor) -> bool:
        return _is_same(outputs, self.outputs)

    def find_used(self, candidates: Sequence[Candidate]) -> list[bool]:
        """Return whether the outputs depend on each candidate; if they do not, any order would pass.

        Axes are permuted one by one only where a tensor has no gradient and yet affects the outputs.
        """
        moved = self._find_differentiable(set().union(*(one.names for one in candidates)))
        still = set().union(*(one.names for one in candidates if not one.names & moved))
        tried = self._find_influential(sorted(still))
        return [bool(one.names & moved) or self._changes_outputs(one, one.names & tried) for one in candidates]

    def _find_influential(self, names: Sequence[str]) -> set[str]:
        """Return the tensors whose order affects the outputs, by bisection."""
        if not names:
            return set()
        rolled = {name: self.state[name].flatten().roll(1).view_as(self.state[name]) for name in names}
        if self._same(run(self.skeleton, {**self.state, **rolled}, self.inputs)):
            return set()
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        return self._find_influential(names[:half]) | self._find_influential(names[half:])

    def _find_differentiable(self, names: set[str]) -> set[str]:
        """Return the parameters for which the outputs have a non-zero gradient."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        leaves = {name: state[name].requires_grad_() for name in sorted(names & self.skeleton.parameters.keys())}
        weights = torch.randn(self.outputs.shape, generator=self.source, dtype=self.outputs.dtype)
        try:
            total = (run(self.skeleton, state, self.inputs, grad=True) * weights).sum()
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        except (RuntimeError, TypeError):  # not differentiable: each axis is tested separately
            return set()
        return {name for name, gradient in zip(leaves, gradients, strict=True) if _moves(gradient)}

    def _changes_outputs(self, candidate: Candidate, names: set[str]) -> bool:
        """Return whether permuting a single axis of these tensors changes the outputs."""
        if not names:
            return False
        group = candidate.options[0][0]
        alone = (replace(group, axes=(axis,)) for axis in group.axes if axis.name in names)
        states = (permute_state(self.state, one, self._order(group.size)) for one in alone)
        return any(not self._same(run(self.skeleton, state, self.inputs)) for state in states)


def _is_same(outputs: Tensor, expected: Tensor) -> bool:
    if outputs.shape != expected.shape:
        return False
    return bool((outputs - expected).abs().max() <= TOLERANCE * float(expected.abs().max()))


def _vary_masks(inputs: Any) -> Iterator[Any]:
    """Yield the inputs with other masks: of ones, and with a 0 at the end and at the beginning of the last axis."""
    masks = {id(tensor) for tensor in tensors(inputs) if _is_mask(tensor)}
    for place, value in ((slice(None), 1), (slice(-1, None), 0), (slice(0, 1), 0)) if masks else ():

        def change(tensor: Tensor, place: slice = place, value: int = value) -> Tensor:
            if id(tensor) not in masks:
                return tensor
            changed = torch.ones_like(tensor)
            changed[..., place] = value
            return changed

        yield map_tensors(change, inputs)


def _is_mask(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.ndim:
        return False
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _moves(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def run(skeleton: Skeleton, state: State, inputs: Any, *, grad: bool = False, exact: bool = True) -> Tensor:
    """Run the network and return all outputs as one vector, computed in float64 throughout if `exact`.

    Random numbers are the same in each run, and the global generator is not advanced.

    Args:
        skeleton: The network without weights.
        state: The weights.
        inputs: The inputs.
        grad: Whether gradients are needed.
        exact: Whether to compute in float64.
    """
    given = state if grad else {name: tensor.clone() for name, tensor in state.items()}
    mode = float64_mode() if exact else nullcontext()
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad), decompose_fused_operations(), mode:
        torch.default_generator.manual_seed(0)
        with skeleton.use_values(given) as network:
            return torch.cat(
                [value.flatten().double() for value in float_outputs(call_network(network, clone(inputs)))]
            )


def _random_inputs(example: Any, source: torch.Generator) -> Iterator[Any]:
    """Yield inputs in float64: normal numbers, positive ones, as masks and degrees may have to be, and the example.

    Integers, such as tokens and the edges of a graph, are those of the example.
    """

    def draw(function: Callable[..., Tensor]) -> Any:
        return map_tensors(
            lambda t: function(t.shape, generator=source, dtype=torch.float64) if t.is_floating_point() else t, example
        )

    given = [tensor for tensor in tensors(example) if tensor.is_floating_point()]
    if given:
        yield draw(torch.randn)
        yield draw(torch.rand)
    if not given or any(bool((tensor != tensor.flatten()[:1]).any()) for tensor in given):
        yield map_tensors(lambda t: t.double() if t.is_floating_point() else t, example)


def _random_state(skeleton: Skeleton, state: State, source: torch.Generator, scale: float) -> State:
    drawn: State = {}
    for name, tensor in state.items():
        varied = name in skeleton.parameters or name.rsplit(".", 1)[-1] in STATISTICS
        kind = DOUBLE_TYPES.get(tensor.dtype, tensor.dtype)
        if not varied or kind not in DOUBLE_TYPES.values():
            drawn[name] = tensor.to(kind, copy=True)
        elif not scale:
            drawn[name] = tensor + 0.05 * torch.rand(tensor.shape, generator=source, dtype=kind)
        elif name in skeleton.parameters and tensor.ndim > 1:
            spread = scale * (2 / max(tensor.shape[1:].numel(), 1)) ** 0.5
            single = torch.complex64 if kind.is_complex else torch.float32  # drawn in a third of the time
            drawn[name] = spread * torch.randn(tensor.shape, generator=source, dtype=single).to(kind)
        else:
            drawn[name] = 0.5 + torch.rand(tensor.shape, generator=source, dtype=kind)
    return drawn
