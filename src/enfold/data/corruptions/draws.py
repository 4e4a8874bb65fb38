"""Counter-based random numbers: each is a hash of (seed, kind of corruption, index of the image, position).

The numbers of an image do not depend on its batch, the number of threads or the device, and a batch is drawn at once.

1. key of an image: 64 bits, SplitMix64's finaliser of (hash of seed and kind) + index · golden ratio
2. number of an element: h(position) xor key₀, mixed by two multiplications and xor-shifts with key₁ between them
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from enfold.seeds import derive

GOLDEN = 0x9E3779B97F4A7C15


class Draws:
    """The random numbers of a batch of images; every call advances the stream of each image.

    Args:
        seed: The seed.
        kind: Kind of corruption.
        indices: Indices of the images in the data set (B,).
    """

    def __init__(self, seed: int, kind: str, indices: Tensor) -> None:
        self._first, self._second = _keys(derive(seed, "corruption", kind), indices)  # (B, 1) each
        self._position = 0
        self.batch, self.device = len(indices), indices.device

    def draw_signed(self, *shape: int) -> Tensor:
        """Return uniform numbers on the open interval (-1, 1): (B, *shape)."""
        return self._bits(shape).float().add_(0.5).mul_(2.0**-22)

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform numbers on the open interval (0, 1): (B, *shape)."""
        return self._bits(shape).float().add_(2.0**22 + 0.5).mul_(2.0**-23)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers by inversion, within ±5.3: (B, *shape)."""
        return to_normal(self.draw_signed(*shape))

    def _bits(self, shape: tuple[int, ...]) -> Tensor:
        """Return integers in [-2²², 2²²), which float32 represents exactly with 0.5 added."""
        size = math.prod(shape)
        positions = torch.arange(self._position, self._position + size, device=self._first.device)
        self._position += size
        bits = _mix(positions.to(torch.int32)) ^ self._first  # (B, size)
        bits = _mix(bits, self._second)
        return (bits >> 9).view(-1, *shape)


def to_normal(signed: Tensor) -> Tensor:
    """Return the standard normal quantile of (1 + signed) / 2."""
    return signed.erfinv().mul_(math.sqrt(2))


def _mix(bits: Tensor, key: Tensor | None = None) -> Tensor:
    """Apply a 32-bit finalizer in place; int32 products wrap, and the masks make arithmetic shifts logical."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    if key is not None:
        bits ^= key
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= 0x846CA68B - 2**32
    return bits


def _keys(base: int, indices: Tensor) -> tuple[Tensor, Tensor]:
    state = indices.to(torch.int64) * (GOLDEN - 2**64) + base  # wraps
    state ^= (state >> 30) & (2**34 - 1)
    state *= 0xBF58476D1CE4E5B9 - 2**64
    state ^= (state >> 27) & (2**37 - 1)
    state *= 0x94D049BB133111EB - 2**64
    state ^= (state >> 31) & (2**33 - 1)
    high, low = state >> 32, (state << 32) >> 32  # both fit int32 with their signs
    return high.to(torch.int32)[:, None], low.to(torch.int32)[:, None]
