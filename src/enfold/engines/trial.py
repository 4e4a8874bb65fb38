"""What engines are tried on: a few examples and parameters that hide nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.engines.skeleton import State

EXAMPLES = 3  # of a batch on which engines are compared: enough to see that examples are mixed


def varied(state: State, parameters: set[str]) -> State:
    """Values like these, but other ones for each member and nowhere constant."""
    rng = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in state.items():
        values = tensor.detach()
        if values.is_floating_point() and values.numel():
            noise = torch.randn(values.shape, generator=rng).to(values)
            if name in parameters:
                values = values + 0.5 * noise * values.std(correction=0).clamp_min(0.1)
            else:
                values = values * (1 + 0.1 * noise.abs())  # a variance stays positive
        found[name] = values
    return found


def examples_of(inputs: Tensor, num_members: int) -> Tensor:
    """A few examples for each member, other ones for each where there are enough: (M, 3, ...)."""
    rows = torch.arange(EXAMPLES)
    own = torch.stack([inputs[((k + 2) * rows // 2) % len(inputs)] for k in range(num_members)])
    if not own.is_floating_point():
        return own
    noise = torch.rand(own.shape, generator=torch.Generator().manual_seed(0)).to(own)
    return own * (0.75 + 0.5 * noise) if own.any() else noise


def same_draws(inputs: Tensor) -> AbstractContextManager[None]:
    """What is drawn inside the block will be drawn again after it."""
    return torch.random.fork_rng(devices=[inputs.device] if inputs.device.type == "cuda" else [])


@dataclass(frozen=True)
class Example:
    """Inputs like those that members were first called with."""

    shape: tuple[int, ...]  # of one input
    dtype: str
    low: float
    high: float

    @classmethod
    def like(cls, inputs: Tensor) -> Example:
        """Describe a batch (B, ...)."""
        values = inputs.detach().double() if not inputs.is_complex() else inputs.detach().abs().double()
        finite = values[values.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        return cls(tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch."), low, high)

    def inputs(self) -> Tensor:
        """Return the same few random inputs each time."""
        drawn = torch.rand(EXAMPLES, *self.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        kind: torch.dtype = getattr(torch, self.dtype)
        scaled = self.low + (self.high - self.low) * drawn
        return (scaled if kind.is_floating_point or kind.is_complex else scaled.round()).to(kind)
