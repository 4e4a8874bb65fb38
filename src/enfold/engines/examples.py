"""Inputs, values and random states for comparisons: of engines with the loop, and of members with their networks."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enfold.data.tree import device_of
from enfold.engines.skeleton import State

NOISE = 131_071  # a prime, so that the noise of members differs for all but multiples of it
EXAMPLES = 3  # rows of a batch on which engines are compared: enough to notice that rows are mixed


def vary(state: State, parameters: Collection[str]) -> State:
    """Return similar values that differ between members and are constant nowhere."""
    found, start = {}, 0
    for name, tensor in state.items():
        values = tensor.detach()
        if values.is_floating_point() and values.numel():
            noise = _take_noise(start, values.numel()).to(values).view(values.shape)
            if name in parameters:
                values = torch.addcmul(values, noise, values.std(correction=0).clamp_min(0.1), value=0.5)
            else:
                values = values * (1 + 0.1 * noise.abs())  # a variance stays positive
            start += values.numel()
        found[name] = values
    return found


@cache
def _draw_noise() -> Tensor:
    with torch.inference_mode(False):
        return torch.randn(NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _take_noise(start: int, size: int) -> Tensor:
    """Return normal random numbers from a table, which is repeated: drawing as many takes ten times as long."""
    table, start = _draw_noise(), start % NOISE
    if start + size <= NOISE:
        return table[start : start + size]
    return torch.cat([table[start:], table.repeat((start + size) // NOISE)])[:size]


def vary_own(state: State, own: Collection[str], parameters: Collection[str]) -> State:
    """Return varied values that differ between members only in the tensors named in `own`."""
    return {
        name: tensor if name in own else tensor[:1].expand_as(tensor)
        for name, tensor in vary(state, parameters).items()
    }


def describe_example(inputs: Any) -> Example | None:
    """Return the description of a batch (B, ...); None for inputs of another structure than a tensor."""
    return Example.like(inputs) if isinstance(inputs, Tensor) else None


def choose_rows(inputs: Tensor, num_members: int) -> Tensor:
    """Return a few rows of a batch for each member, different ones where there are enough: (M, 3, ...)."""
    rows = torch.arange(EXAMPLES)
    own = torch.stack([inputs[((k + 2) * rows // 2) % len(inputs)] for k in range(num_members)])
    if not own.is_floating_point():
        return own
    noise = torch.rand(own.shape, generator=torch.Generator().manual_seed(0)).to(own)
    return own * (0.75 + 0.5 * noise) if own.any() else noise


def preserve_rng(inputs: Any) -> AbstractContextManager[None]:
    """Restore the random state of torch after the block, for the CPU and for the device of the inputs."""
    device = device_of(inputs)
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def fix_rng(inputs: Any) -> Iterator[None]:
    """Seed torch, numpy and Python inside the block, and restore their random states after it."""
    before = random.getstate(), np.random.get_state(legacy=False)
    with preserve_rng(inputs):
        seed_rng(device_of(inputs))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def seed_rng(device: torch.device, seed: int = 0) -> None:
    """Seed the generators of torch (CPU and one device), numpy and Python."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also records a stack trace for unused devices
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass(frozen=True)
class Example:
    """Shape, dtype and range of the inputs with which an ensemble was called first."""

    shape: tuple[int, ...]  # of one input
    dtype: str
    low: float
    high: float

    @classmethod
    def like(cls, inputs: Tensor) -> Example:
        """Return the description of a batch (B, ...)."""
        values = inputs.detach().abs() if inputs.is_complex() else inputs.detach()
        low, high = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)
        if not math.isfinite(high - low):
            finite = values[values.isfinite()]
            low, high = map(float, finite.aminmax()) if finite.numel() else (0.0, 0.0)
        return cls(tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch."), low, high)

    def inputs(self) -> Tensor:
        """Return a few random inputs, the same ones in every call."""
        drawn = torch.rand(EXAMPLES, *self.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        kind: torch.dtype = getattr(torch, self.dtype)
        scaled = self.low + (self.high - self.low) * drawn
        return (scaled if kind.is_floating_point or kind.is_complex else scaled.round()).to(kind)
