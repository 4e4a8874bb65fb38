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

from enfold.data.tree import clone, detach, device_of, first_examples
from enfold.engines.base import CannotRun, Engine, EngineName, Loop
from enfold.engines.examples import EXAMPLES, choose_rows, preserve_rng, vary
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.stacked import StackedProgram
from enfold.engines.vmap import Vmap
from enfold.errors import EnfoldError

GRADIENT = "gradients of "  # before the name of a parameter


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
    """Return the engine of that name; raises CannotRun if it cannot run this network."""
    if name == "loop":
        return Loop(skeleton)
    if name == "vmap" and any(getattr(layer, "padding_idx", None) is not None for layer in skeleton.network.modules()):
        raise CannotRun("torch.vmap would train the padding row of an embedding")  # as of torch 2.13
    for buffer in skeleton.buffers:
        if len(state[buffer]) > 1 and not state[buffer].stride(0):
            raise CannotRun(f"the buffer '{buffer}' is the same tensor for all members, which would update it at once")
    engine = StackedProgram(skeleton) if name == "stacked" else Vmap(skeleton)
    with preserve_rng(inputs):
        check_engine(engine, skeleton, state, inputs)
    return engine


@torch.no_grad()
def check_engine(engine: Engine, skeleton: Skeleton, state: State, inputs: Any) -> None:
    """Compare outputs, buffers and gradients of an engine with those of the loop, in both modes.

    A few examples, common to all members and each member's own, and varied copies of the parameters are used, so that
    equal members or a layer of zeros hide no difference. Gradients are compared in train mode, because a trace contains
    neither `torch.no_grad` nor the backward pass of a `torch.autograd.Function`. Vmap mixes no members and is only
    required to run.

    Raises:
        CannotRun: If the engine fails or gives other results.
    """
    values = vary(state, skeleton.parameters)
    few = _choose_examples(inputs, len(next(iter(state.values()))))
    for training in (False, True):
        for each, rows in few:
            grad = training and not each and isinstance(engine, StackedProgram)
            with disable_dropout(skeleton.network, training):
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
    """Return the outputs, named "", the buffers and modified parameters, and with `grad` the gradients of the
    parameters and of the inputs."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        state = {name: tensor.clone() for name, tensor in values.items()}
        leaves = {name: state[name].requires_grad_() for name in skeleton.trainable & state.keys() if grad}
        versions = {name: tensor._version for name, tensor in state.items()}
        rows = clone(rows)
        if grad and isinstance(rows, Tensor) and rows.is_floating_point():
            leaves["the inputs"] = rows.requires_grad_()
            rows = rows.clone()  # a network may modify its inputs in place
        outputs = engine(state, rows, each)
        if outputs.requires_grad:
            real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
            source = torch.Generator().manual_seed(0)
            real.backward(torch.rand(real.shape, generator=source).to(real) + 0.5)
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    same = {name for name in skeleton.parameters & state.keys() if state[name]._version == versions[name]}
    after = {name: tensor for name, tensor in state.items() if name not in same}
    found = {"": outputs, **after, **{f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()}}
    return {name: tensor.detach() for name, tensor in found.items()}


def _choose_examples(inputs: Any, num_members: int) -> list[tuple[bool, Any]]:
    """Return a few common examples, and, for a tensor, examples of each member's own."""
    if isinstance(inputs, Tensor):
        own = choose_rows(inputs, num_members)  # (M, 3, ...)
        return [(False, own[0]), (True, own)]
    few = first_examples(inputs, EXAMPLES)
    return [(False, detach(inputs if few is None else few))]


def compare_results(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CannotRun if outputs (named ""), buffers or gradients differ by more than rounding errors."""
    tolerance = max(1e-3, 8 * torch.finfo(_compute_dtype(expected[""])).eps)
    sizes = {name: float(tensor.abs().max()) if tensor.numel() else 1.0 for name, tensor in expected.items()}
    # The gradient of a bias before a batch norm consists of rounding errors alone.
    floor = 0.1 * max((size for name, size in sizes.items() if name.startswith(GRADIENT)), default=0.0)
    for name in dict.fromkeys([*expected, *found]):
        tensor, other, is_gradient = expected.get(name), found.get(name), name.startswith(GRADIENT)
        size = sizes.get(name, 0.0)
        allowed = tolerance * (10 * max(size, floor) if is_gradient else max(size, 1e-6))
        if tensor is None or other is None or other.shape != tensor.shape or not _is_near(other, tensor, allowed):
            what = f"another value of the buffer '{name}'" if name else "other outputs"
            what = f"other {name}" if is_gradient else what
            raise CannotRun(f"it gives {what} than the members one by one")


def _is_near(found: Tensor, expected: Tensor, allowed: float) -> bool:
    return bool(((found - expected).abs() <= allowed).all())


def _compute_dtype(outputs: Tensor) -> torch.dtype:
    device = outputs.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else outputs.dtype


@contextmanager
def disable_dropout(network: nn.Module, training: bool) -> Iterator[None]:
    """Set train or eval mode inside the block, without dropout, whose random numbers differ between engines."""
    with eval_mode(network):
        network.train(training)
        for module in network.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        yield


@torch.no_grad()
def measure_engines(skeleton: Skeleton, state: State, inputs: Any, rounds: int = 5) -> Engine:
    """Time every engine that can run the network on these inputs, in turns; return the one with the smallest median."""
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
