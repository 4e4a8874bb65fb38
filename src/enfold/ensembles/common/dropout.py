"""Dropout that is active in eval mode, reproducible, and drawn for many samples in one pass.

The cost of dropout on a CPU is that of drawing masks. Sixteen random bits per unit, taken from the raw words of numpy's
SFC64 and compared by numpy, were the fastest method measured on one thread; rates are rounded to 1/65536.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from enfold.seeds import derive

LEVELS = 1 << 16  # number of different rates
PER_WORD = 4  # units per word of 64 bits
SELU_FLOOR = -1.7580993408473766  # the value of a unit that alpha dropout drops: SELU at minus infinity

ELEMENTS = (F.dropout, torch.dropout, torch.dropout_)
CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
ALPHA = (F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_)
ALPHA_CHANNELS = (F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_)
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class OnePassOnly(Exception):
    """Several samples cannot run in one pass of this network."""


class Streams:
    """Random words for the dropouts of a network, in the order of its forward pass.

    The words of a dropout depend on the seed, its position in that order and the sample, so that fewer samples are the
    first of more; samples must be drawn in order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sources: dict[int, np.random.SFC64] = {}

    def draw_masks(self, index: int, samples: int, shape: Sequence[int], kept: int) -> Tensor:
        """Return masks, (samples, *shape), of ones with probability kept / 65536 and zeros.

        Args:
            index: The index of the dropout in the forward pass.
            samples: The number of samples.
            shape: The shape of a mask.
            kept: The probability of a 1, in units of 1 / 65536.
        """
        source = self.sources.get(index)
        if source is None:
            source = self.sources[index] = np.random.SFC64(derive(self.seed, "dropout", index))
        units = math.prod(shape)
        words = -(-units // PER_WORD)  # complete words for each sample
        bits = source.random_raw(samples * words).view(np.int16).reshape(samples, words * PER_WORD)[:, :units]
        return torch.from_numpy(bits >= LEVELS // 2 - kept).view(torch.uint8).view(samples, *shape)


class Dropping(TorchFunctionMode):
    """A context in which every dropout is active, in any mode of its module, with masks drawn from `streams`.

    Args:
        streams: The random words.
        axes: The axis of the examples for each dropout in the order of the pass, see `row_axes`; the rows of a sample
            are consecutive.
        first: The index of the first sample.
        samples: The number of samples in the pass.
        late: Whether the inputs are not repeated: the first dropout then returns a copy of its input for each sample,
            so that all layers before it run once.
        per_example: Draw a mask for every example, or one per sample.
    """

    def __init__(
        self,
        streams: Streams,
        axes: Sequence[int | None] = (),
        first: int = 0,
        samples: int = 1,
        *,
        late: bool = False,
        per_example: bool = True,
    ) -> None:
        super().__init__()
        self.streams, self.axes, self.first, self.samples = streams, axes, first, samples
        self.late, self.per_example = late and samples > 1, per_example
        self.shapes: list[torch.Size] = []  # of the inputs of each dropout
        self.active = 0  # calls with a rate above 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the handler of a dropout function, or `func` itself."""
        handler = HANDLERS.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(self, func, *args, **(kwargs or {}))

    def units(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Set units or complete channels to zero, or to the minimum of SELU.

        Args:
            func: The function that is called.
            input: The input of the dropout function.
            p: The dropout rate.
            training: Ignored: dropout is active in any mode.
            inplace: Whether the function may overwrite its input.
        """
        shape = _channel_shape(input) if func in (*CHANNELS, *ALPHA_CHANNELS) else input.shape
        combine = _drop_to_floor if func in (*ALPHA, *ALPHA_CHANNELS) else _drop_to_zero
        return self.drop(input, p, shape, combine, inplace)

    def attention(self, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the code of `F.multi_head_attention_forward` with this dropout in place of its own."""
        if not _rate_of_attention(args, kwargs):
            plain: tuple[Tensor, Tensor | None] = func(*args, **kwargs)
            return plain
        scope = {
            **vars(F),
            "has_torch_function": lambda _: False,
            "dropout": lambda weights, p: self.units(F.dropout, weights, p),
        }
        code = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
        # Dropout is a separate call only if the weights are returned.
        output, weights = code(*args, **{**kwargs, "training": True, "need_weights": True})
        return output, weights if kwargs.get("need_weights", True) else None

    def product_attention(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run attention with a dropout rate of its own: torch draws the mask, one sample per pass."""
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        attended: Tensor = self.run_seeded(func, args, kwargs) if rate else func(*args, **kwargs)
        return attended

    def recurrent(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a recurrent network with dropout between layers: torch draws the mask, one sample per pass."""
        place = next((index for index, value in enumerate(args) if isinstance(value, float)), None)
        if place is None or not args[place]:
            return func(*args, **kwargs)
        return self.run_seeded(func, (*args[: place + 1], True, *args[place + 2 :]), kwargs)  # train=True

    def run_seeded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that draws its own masks, with torch's generators seeded for it.

        Args:
            func: The function that is called.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        if self.samples > 1:
            raise OnePassOnly
        self.active += 1
        with torch.random.fork_rng():
            torch.manual_seed(derive(self.streams.seed, "torch's dropout", self.active, self.first))
            return func(*args, **kwargs)

    def drop(self, x: Tensor, rate: float, shape: Sequence[int], combine: Combine, inplace: bool = False) -> Tensor:
        """Return `x` with a mask for each sample; `shape` is that of x, with 1 for axes that have one mask value.

        Args:
            x: The input.
            rate: The dropout rate.
            shape: The shape of a mask.
            combine: Applies a mask to units, given the probability of a unit to remain.
            inplace: Whether the function may overwrite its input.
        """
        if inplace:  # the caller may use the input afterwards
            if self.late:
                raise OnePassOnly
            return x.copy_(self.drop(x, rate, shape, combine))
        place, kept = len(self.shapes), round((1 - rate) * LEVELS)
        self.shapes.append(x.shape)
        if kept == LEVELS:
            return x
        self.active += 1
        axis = self.axes[place] if place < len(self.axes) else None
        if self.samples > 1 and (axis is None or (self.late and axis)):
            raise OnePassOnly
        own = list(shape)  # of the mask of one sample
        if axis is not None:
            own[axis] = x.shape[axis] // (1 if self.late else self.samples) if self.per_example else 1
        keep = self.streams.draw_masks(place, self.samples, own, kept).to(x.device)
        if self.late:
            self.late = False
            return combine(x.unsqueeze(0), keep, kept / LEVELS).flatten(0, 1)
        if axis is None or self.samples == 1:
            return combine(x, keep[0], kept / LEVELS)
        rows = x.unflatten(axis, (self.samples, -1))
        return combine(rows, keep.movedim(0, axis), kept / LEVELS).flatten(axis, axis + 1)


def row_axes(few: Sequence[torch.Size], more: Sequence[torch.Size]) -> list[int | None]:
    """Return the axis of the examples in the inputs of each dropout: the one that is longer for more examples."""
    return [
        next((axis for axis, size in enumerate(shape) if axis < len(other) and size < other[axis]), None)
        for shape, other in zip(few, more, strict=False)
    ]


Combine = Callable[[Tensor, Tensor, float], Tensor]  # of units, mask, and the probability of a unit to remain

HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*ELEMENTS, *CHANNELS, *ALPHA, *ALPHA_CHANNELS), Dropping.units),
    **dict.fromkeys(RECURRENT, Dropping.recurrent),
    F.multi_head_attention_forward: Dropping.attention,
    F.scaled_dot_product_attention: Dropping.product_attention,
}


def _drop_to_zero(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Return x / probability where the mask is 1, and 0 elsewhere, also if the probability is 0."""
    return x * (1 / probability if probability else 0.0) * keep


def _drop_to_floor(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Return the minimum of SELU where the mask is 0, shifted and scaled to the mean 0 and variance 1 of SELU units.

    G. Klambauer et al., arXiv:1706.02515.
    """
    rate = 1 - probability
    scale = 1 / math.sqrt(probability * (1 + rate * SELU_FLOOR**2)) if probability else 0.0
    return scale * (x * keep + SELU_FLOOR * (1 - keep.to(x.dtype)) - SELU_FLOOR * rate)


def _channel_shape(x: Tensor) -> list[int]:
    """Return the shape of a mask of channels, (N, C, 1, ...)."""
    return [*x.shape[:2], *(1,) * (x.ndim - 2)]


def _rate_of_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[10] if len(args) > 10 else kwargs["dropout_p"])


def dropout_rates(network: nn.Module) -> dict[str, float]:
    """Return the rates above 0 of dropout modules, by name."""
    rates = {}
    for name, module in network.named_modules():
        if isinstance(module, _DropoutNd):
            rates[name] = float(module.p)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            rates[name] = float(module.dropout)
    return {name: rate for name, rate in rates.items() if rate > 0}
