"""Engines: three ways to run M networks whose parameters are stacked; all give the same numbers.

On two CPU cores stacked products win for linear layers, and a loop in channels-last for convolutions, where vmap and
grouped convolution lose to a plain loop; `make bench` measures it (results/bench-members.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.layout import runs_channels_last
from enfold.members.skeleton import Skeleton, State

EngineName = Literal["auto", "measure", "stacked", "loop", "vmap"]
Engine = Callable[[State, Tensor, bool], Tensor]  # (state, inputs, each) -> (M, B, C)


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
    return laid_out(inputs, inputs.ndim == 4 and runs_channels_last(network))


def laid_out(inputs: Tensor, channels_last: bool) -> Tensor:
    """Images on a CPU in channels-last if wanted; anything else as it is."""
    if channels_last and inputs.ndim == 4 and inputs.device.type == "cpu":
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


class Loop:
    """One network after the other, each with its slice of the stacked state."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.channels_last = runs_channels_last(skeleton.network)

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: tensor.unbind(0) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        shared = None if each else laid_out(inputs, self.channels_last)
        outputs = []
        for index in range(num_members):
            own = laid_out(inputs[index], self.channels_last) if shared is None else shared
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
