"""Preprocess: the normalization of inputs as a part of an exported graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.errors import EnfoldError


class Preprocess(nn.Module):
    """Scale bytes to [0, 1], and normalize: (x - mean) / std, by channel.

    Args:
        mean: The mean of each channel of inputs in [0, 1], or one number.
        std: The standard deviation of each channel, or one number.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32))
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return normalized inputs: (B, C, ...) -> (B, C, ...)."""
        pixels = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        shape = (-1, *(1,) * (inputs.ndim - 2))
        return (pixels - self.mean.view(shape).to(pixels.dtype)) / self.std.view(shape).to(pixels.dtype)


def make_preprocess(given: Any) -> Preprocess | None:
    """Return the normalization of a data set, or of a pair (mean, std); None for none.

    Raises:
        EnfoldError: If it is neither, or a standard deviation is not positive.
    """
    if given is None:
        return None
    if isinstance(given, Data):
        if given.mean is not None and given.std is not None:
            return Preprocess(given.mean, given.std)
        return Preprocess([0.0], [1.0]) if given.has_pixels else None
    try:
        mean, std = (list(each) if isinstance(each, Sequence | Tensor) else [each] for each in given)
        made = Preprocess([float(each) for each in mean], [float(each) for each in std])
    except (TypeError, ValueError) as error:
        raise EnfoldError(
            f"preprocess must be a data set or a pair (mean, std), got {given!r}: pass for example "
            "preprocess=((0.5,), (0.25,))"
        ) from error
    if not bool((made.std > 0).all()) or len(made.mean) not in (1, len(made.std)):
        raise EnfoldError(
            f"preprocess must have positive standard deviations, one per mean, got {given!r}: correct preprocess"
        )
    return made
