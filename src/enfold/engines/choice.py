"""The choice of an engine: it is used only after it has given what the loop gives, in train and in eval mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from enfold.engines.base import Engine, EngineName, Loop, Vmap
from enfold.engines.modes import evaluating
from enfold.engines.program import CannotRun, StackedProgram
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.trial import examples_of, same_draws, varied
from enfold.errors import EnfoldError


def require_engine(name: EngineName) -> EngineName:
    """The name, if there is such an engine."""
    if name not in get_args(EngineName):
        raise EnfoldError(
            f"there must be an engine of that name, got {name!r}: choose one of {', '.join(get_args(EngineName))}"
        )
    return name


def choose_engine(name: EngineName, skeleton: Skeleton, state: State, inputs: Tensor) -> Engine:
    """The engine of that name; "auto": stacked where the network allows it, else a loop on a CPU, vmap elsewhere."""
    if name == "measure":
        return fastest_engine(skeleton, state, inputs)
    candidates = [name] if name != "auto" else ["stacked"] if inputs.device.type == "cpu" else ["stacked", "vmap"]
    for candidate in candidates:
        try:
            return tried_engine(candidate, skeleton, state, inputs)
        except CannotRun as reason:
            if name != "auto":
                raise EnfoldError(
                    f"the engine '{name}' cannot run this network because {reason}: use engine: auto"
                ) from reason
    return Loop(skeleton)


def tried_engine(name: str, skeleton: Skeleton, state: State, inputs: Tensor) -> Engine:
    """The engine, if it can run this network; raises `CannotRun`."""
    if name == "loop":
        return Loop(skeleton)
    if name == "vmap" and any(getattr(part, "padding_idx", None) is not None for part in skeleton.network.modules()):
        raise CannotRun("torch.vmap would train the padding row of an embedding")  # seen in torch 2.13
    for buffer in skeleton.buffers:
        if len(state[buffer]) > 1 and not state[buffer].stride(0):
            raise CannotRun(f"members share the buffer '{buffer}', which they would write to at once")
    engine = StackedProgram(skeleton) if name == "stacked" else Vmap(skeleton)
    with same_draws(inputs):
        return passed(engine, skeleton, state, inputs)


@torch.no_grad()
def passed(engine: Engine, skeleton: Skeleton, state: State, inputs: Tensor) -> Engine:
    """The engine, if it gives what the loop gives: outputs and buffers, in both modes, for shared and own inputs.

    A few examples and varied parameters are taken, so that nothing hides behind equal members or a layer of zeros,
    and nothing of the members' own is changed. Of vmap, which mixes nothing, only that it runs is asked.
    """
    values = varied(state, set(skeleton.parameters))
    own = examples_of(inputs, len(next(iter(state.values()))))  # (M, 3, ...)
    for training in (False, True):
        for each in (False, True):
            seen = own if each else own[0]
            ours, theirs = ({name: tensor.clone() for name, tensor in values.items()} for _ in range(2))
            with without_draws(skeleton.network, training):
                try:
                    expected, found = Loop(skeleton)(theirs, seen, each), engine(ours, seen, each)
                except CannotRun:
                    raise
                except Exception as error:  # of the user's own forward, or of an operation that cannot be batched
                    raise CannotRun(f"it does not run on a few examples ({error})") from error
            if isinstance(engine, StackedProgram):
                compare({"": expected, **theirs}, {"": found, **ours})
    return engine


def compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raises `CannotRun` where an engine gave something else than expected."""
    tolerance = max(1e-3, 8 * torch.finfo(_coarsest(expected[""])).eps)
    for name, tensor in expected.items():
        scale = tensor.abs().max().clamp_min(1e-6) if tensor.numel() else 1.0
        if found[name].shape != tensor.shape or not bool(((found[name] - tensor).abs() <= tolerance * scale).all()):
            what = f"in the buffer '{name}'" if name else "as outputs"
            raise CannotRun(f"it does not give {what} what the members give one by one")


def _coarsest(outputs: Tensor) -> torch.dtype:
    device = outputs.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else outputs.dtype


@contextmanager
def without_draws(network: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode, without the draws of dropout, which differ between engines."""
    with evaluating(network):
        network.train(training)
        for module in network.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        yield


@torch.no_grad()
def fastest_engine(skeleton: Skeleton, state: State, inputs: Tensor, rounds: int = 5) -> Engine:
    """Time every engine that can run this network on these inputs, in turns, and take the fastest median."""
    engines: list[Engine] = []
    for candidate in ("loop", "stacked", "vmap"):
        try:
            engines.append(tried_engine(candidate, skeleton, state, inputs))
        except CannotRun:
            continue
    times: dict[Engine, list[float]] = {engine: [] for engine in engines}
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    with evaluating(skeleton.network):
        for engine in engines * (rounds + 1):
            seen = inputs.clone() if skeleton.writes_inputs else inputs
            started = time.perf_counter()
            engine(values, seen, False)
            if inputs.device.type == "cuda":
                torch.cuda.synchronize(inputs.device)
            times[engine].append(time.perf_counter() - started)
    return min(engines, key=lambda engine: statistics.median(times[engine][1:]))  # the first run warms up
