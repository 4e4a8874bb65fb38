"""Engines: three ways to run M networks whose parameters are stacked; all give the same numbers.

Measured on two CPU cores (a training step of 4 members against one network, batch 128): a 784-256-256-10 MLP takes 4.1
by a loop, 4.0 by vmap and 2.6 by stacked products; a small CNN with batch norm takes 7.7 by vmap, 5.5 by grouped
convolution, 4.1 by a loop and 3.0 by a loop in channels-last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.program import NotStackable, StackedProgram
from enfold.members.skeleton import Skeleton, State
from enfold.modes import evaluating

EngineName = Literal["auto", "measure", "stacked", "loop", "vmap"]
Engine = Callable[[State, Tensor, bool], Tensor]  # (state, inputs, each) -> (M, B, C)

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returns: a tensor, or an object or dictionary with `logits`."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EnfoldError(
            f"a network must return a tensor of logits or an object with `logits`, got {type(output).__name__}: "
            "wrap it in a module that returns the logits"
        )
    return logits


def image_layout(network: nn.Module, inputs: Tensor) -> Tensor:
    """Images in channels-last where the network convolves on a CPU: there it is up to twice as fast."""
    if inputs.device.type != "cpu" or inputs.ndim != 4:
        return inputs
    if not any(isinstance(module, CONVOLUTIONS) for module in network.modules()):
        return inputs
    return inputs.contiguous(memory_format=torch.channels_last)


class Loop:
    """One network after the other, each with its slice of the stacked state."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: tensor.unbind(0) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        shared = None if each else image_layout(self.skeleton.network, inputs)
        outputs = []
        for index in range(num_members):
            own = image_layout(self.skeleton.network, inputs[index]) if shared is None else shared
            with self.skeleton.holding({name: tensors[index] for name, tensors in slices.items()}) as network:
                outputs.append(logits_of(network(own)))
        return torch.stack(outputs)


class Vmap:
    """All networks at once by torch.vmap; dropout draws differ between members."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""

        def one(values: State, own: Tensor) -> Tensor:
            with self.skeleton.holding(values) as network:
                return logits_of(network(own))

        in_dims = (0, 0 if each else None)
        outputs: Tensor = torch.vmap(one, in_dims=in_dims, randomness="different")(state, inputs)
        return outputs


def choose_engine(name: EngineName, skeleton: Skeleton, state: State, inputs: Tensor) -> Engine:
    """The engine of that name; "auto": stacked where the network allows it, else a loop on a CPU, vmap elsewhere."""
    if name not in get_args(EngineName):
        raise EnfoldError(f"the engine must be one of {', '.join(get_args(EngineName))}, got {name!r}")
    if not next(iter(state.values()), torch.empty(1)).ndim:
        raise EnfoldError("a network must have parameters or buffers to make an ensemble of, got none")
    if name == "measure":
        return fastest_engine(skeleton, state, inputs)
    if name in ("auto", "stacked"):
        try:
            return verified(StackedProgram(skeleton), skeleton, state, inputs)
        except NotStackable as reason:
            if name == "stacked":
                raise EnfoldError(
                    f"this network cannot be run by stacked products because {reason}: use engine='auto'"
                ) from reason
    if name == "vmap" or (name == "auto" and inputs.device.type != "cpu"):
        return Vmap(skeleton)
    return Loop(skeleton)


@torch.no_grad()
def verified(program: StackedProgram, skeleton: Skeleton, state: State, inputs: Tensor) -> Engine:
    """The program, if it gives on a few examples what the loop gives; eval mode, so nothing is changed or drawn."""
    few = inputs[:3]
    with evaluating(skeleton.network):
        expected = Loop(skeleton)(state, few, False)
        try:
            found = program(state, few, False)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise NotStackable(f"its graph does not run on stacked values ({error})") from error
    scale = expected.abs().max().clamp_min(1e-6)
    if found.shape != expected.shape or not bool(((found - expected).abs().max() / scale) < 1e-3):
        raise NotStackable("stacked products do not give what its members give one by one")
    return program


@torch.no_grad()
def fastest_engine(skeleton: Skeleton, state: State, inputs: Tensor, rounds: int = 5) -> Engine:
    """Time every engine that can run this network on these inputs, in turns, and take the fastest median."""
    engines: list[Engine] = [Loop(skeleton)]
    for candidate in ("stacked", "vmap"):
        try:
            engine = choose_engine(candidate, skeleton, state, inputs)
            with evaluating(skeleton.network):
                engine(state, inputs, False)
        except (EnfoldError, RuntimeError):
            continue
        engines.append(engine)
    times: dict[Engine, list[float]] = {engine: [] for engine in engines}
    with evaluating(skeleton.network):
        for engine in engines * rounds:
            started = time.perf_counter()
            engine(state, inputs, False)
            if inputs.device.type == "cuda":
                torch.cuda.synchronize(inputs.device)
            times[engine].append(time.perf_counter() - started)
    return min(engines, key=lambda engine: statistics.median(times[engine]))
