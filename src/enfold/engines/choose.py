"""The choice of an engine: one is used only after it gave the results of the loop, in train and in eval mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from enfold.data.tree import clone, count_examples, detach, device_of, map_tensors, tensors
from enfold.engines.base import CannotRun, Engine, EngineName, Loop
from enfold.engines.compare import GRADIENT, OUTPUTS, find_difference, precision
from enfold.engines.examples import choose_rows, preserve_rng, vary
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.stacked import StackedProgram
from enfold.engines.vmap import Vmap
from enfold.errors import EnfoldError


def require_engine(name: EngineName) -> EngineName:
    """Return the name; raises EnfoldError if there is no such engine."""
    if name not in get_args(EngineName):
        raise EnfoldError(f"engine must be one of {', '.join(get_args(EngineName))}, got {name!r}: choose one of them")
    return name


def choose_engine(name: EngineName, skeleton: Skeleton, state: State, inputs: Any) -> Engine:
    """Return an engine for a network.

    Args:
        name: The name of an engine; "auto": stacked if the network allows it, otherwise the loop on a CPU and vmap on
            other devices; "measure": the fastest one.
        skeleton: The network.
        state: The values of all members, which are not modified.
        inputs: A batch of any structure.

    Raises:
        EnfoldError: If the engine of that name cannot run the network.
    """
    if name == "measure":
        return measure_engines(skeleton, state, inputs)
    candidates = [name] if name != "auto" else ["stacked"] if device_of(inputs).type == "cpu" else ["stacked", "vmap"]
    for candidate in candidates:
        try:
            return make_engine(candidate, skeleton, state, inputs)
        except CannotRun as reason:
            if name != "auto":
                raise EnfoldError(
                    f"the engine '{name}' cannot run this network because {reason}: use engine='auto'"
                ) from reason
    return Loop(skeleton)


def make_engine(name: str, skeleton: Skeleton, state: State, inputs: Any) -> Engine:
    """Return the engine of that name; raises CannotRun if it cannot run this network.

    Args:
        name: loop, stacked or vmap.
        skeleton: The network without values.
        state: Stacked values, (M, *shape).
        inputs: A batch (B, ...).
    """
    if name == "loop":
        return Loop(skeleton)
    if name == "vmap" and any(getattr(layer, "padding_idx", None) is not None for layer in skeleton.network.modules()):
        raise CannotRun("torch.vmap would train the padding row of an embedding")  # as of torch 2.13
    for buffer in skeleton.buffers:
        if len(state[buffer]) > 1 and not state[buffer].stride(0):
            raise CannotRun(f"the buffer '{buffer}' is the same tensor for all members, which would update it at once")
    engine = StackedProgram(skeleton, inputs) if name == "stacked" else Vmap(skeleton)
    with preserve_rng(inputs):
        try:
            check_engine(engine, skeleton, state, inputs)
        except CannotRun:
            if not isinstance(engine, StackedProgram) or not engine.reads_shapes():
                raise
            engine.merges_inputs = True
            check_engine(engine, skeleton, state, inputs)
    return engine


@torch.no_grad()
def check_engine(engine: Engine, skeleton: Skeleton, state: State, inputs: Any) -> None:
    """Compare outputs, buffers and gradients of an engine with those of the loop, in both modes.

    A few examples, common to all members and each member's own, and varied copies of the parameters are used, so that
    equal members or a layer of zeros hide no difference. Gradients are compared in train mode, because a trace contains
    neither `torch.no_grad` nor the backward pass of a `torch.autograd.Function`. Vmap mixes no members and is only
    required to run.

    Args:
        engine: The engine.
        skeleton: The network without values.
        state: Stacked values, (M, *shape).
        inputs: A batch (B, ...).

    Raises:
        CannotRun: If the engine fails or gives other results.
    """
    values = vary(state, skeleton.parameters)
    few = _choose_examples(inputs, len(next(iter(state.values()))))
    for training in (False, True):
        with disable_dropout(skeleton.network, training):
            for each, rows in few:
                grad = training and not each and isinstance(engine, StackedProgram)
                try:
                    expected = run_once(Loop(skeleton), skeleton, values, rows, each=each, grad=grad)
                    found = run_once(engine, skeleton, values, rows, each=each, grad=grad)
                except CannotRun:
                    raise
                except Exception as error:  # of the user's own forward, or of an operation that cannot be batched
                    raise CannotRun(f"it does not run on a few examples ({error})") from error
                if isinstance(engine, StackedProgram):
                    compare_results(expected, found)


def run_once(
    engine: Engine, skeleton: Skeleton, values: State, rows: Any, *, each: bool = False, grad: bool = False
) -> dict[str, Tensor]:
    """Return the outputs, buffers and modified parameters, and with `grad` the gradients of parameters and inputs.

    Args:
        engine: The engine.
        skeleton: The network without values.
        values: Stacked values, (M, *shape); not modified.
        rows: Examples (B, ...), or (M, B, ...) if `each`.
        each: Whether each member has its own examples.
        grad: Whether gradients are computed.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        fixed = {name for name in skeleton.parameters if name not in skeleton.written}
        state = {  # tensors made in inference mode cannot require gradients
            name: tensor.detach() if name in fixed and not tensor.is_inference() else tensor.clone()
            for name, tensor in values.items()
        }
        leaves = {name: state[name].requires_grad_() for name in skeleton.trainable & state.keys() if grad}
        versions = {name: tensor._version for name, tensor in state.items()}
        rows = clone(rows)
        if grad:
            given = [tensor for tensor in tensors(rows) if tensor.is_floating_point()]
            leaves |= {f"input {index}": tensor.requires_grad_() for index, tensor in enumerate(given)}
            rows = clone(rows)  # a network may modify its inputs in place
        outputs = engine(state, rows, each)
        real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if leaves and outputs.requires_grad:
            weights = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).to(real) + 0.5
            grads = torch.autograd.grad(real, list(leaves.values()), weights, allow_unused=True)
    gradients = {
        f"{GRADIENT}'{name}'": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), grads, strict=True)
    }
    same = {name for name in skeleton.parameters & state.keys() if state[name]._version == versions[name]}
    after = {f"'{name}'": tensor for name, tensor in state.items() if name not in same}
    return {name: tensor.detach() for name, tensor in {OUTPUTS: outputs, **after, **gradients}.items()}


def _choose_examples(inputs: Any, num_members: int) -> list[tuple[bool, Any]]:
    """Return a few common examples, and, for a tensor, examples of each member's own."""
    if isinstance(inputs, Tensor):
        own = choose_rows(inputs, num_members)  # (M, 3, ...)
        return [(False, own[0]), (True, own)]
    if count_examples(inputs) is not None:
        return [(False, map_tensors(lambda tensor: choose_rows(tensor.detach(), 1)[0], inputs))]
    return [(False, detach(inputs))]


def compare_results(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CannotRun if outputs, buffers, modified parameters or gradients differ by more than rounding errors."""
    tolerance = max(1e-3, 8 * precision(expected[OUTPUTS]))
    name = find_difference(expected, found, tolerance, equal_nan=False)
    if name is not None:
        what = f"other {name.removeprefix('the ')}" if name in expected else f"another value of {name}"
        raise CannotRun(f"it gives {what} than the members one by one")


@contextmanager
def disable_dropout(network: nn.Module, training: bool) -> Iterator[None]:
    """Set train or eval mode inside the block, without dropout, whose random numbers differ between engines."""
    with eval_mode(network):
        if training:
            network.train()
            for module in network.modules():
                if isinstance(module, _DropoutNd):
                    module.eval()
        yield


@torch.no_grad()
def measure_engines(skeleton: Skeleton, state: State, inputs: Any, rounds: int = 5) -> Engine:
    """Time every engine that can run the network on these inputs, in turns; return the one with the smallest median.

    Args:
        skeleton: The network without values.
        state: Stacked values, (M, *shape).
        inputs: A batch (B, ...).
        rounds: Number of timed calls of each engine.
    """
    engines: list[Engine] = []
    for candidate in ("loop", "stacked", "vmap"):
        try:
            engines.append(make_engine(candidate, skeleton, state, inputs))
        except CannotRun:
            continue
    times: dict[Engine, list[float]] = {engine: [] for engine in engines}
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    with eval_mode(skeleton.network):
        for engine in engines * (rounds + 1):
            rows = clone(inputs) if skeleton.writes_inputs else inputs
            start = time.perf_counter()
            engine(values, rows, False)
            if device_of(inputs).type == "cuda":
                torch.cuda.synchronize(device_of(inputs))
            times[engine].append(time.perf_counter() - start)
    return min(engines, key=lambda engine: statistics.median(times[engine][1:]))  # without the first, which warms up
