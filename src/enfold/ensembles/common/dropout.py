"""Dropout drawn by ourselves: active where everything else is in eval mode, reproducible, for many samples in one pass.

Drawing masks is what dropout costs on a CPU. Sixteen random bits a unit, taken from the raw words of numpy's SFC64 and
compared by numpy, were the fastest of the ways we timed on one thread; rates are rounded to 1/65536.
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

LEVELS = 1 << 16  # of a rate
PER_WORD = 4  # units a word of 64 bits
SELU_FLOOR = -1.7580993408473766  # what alpha dropout puts in a unit's place: SELU's value at minus infinity

ELEMENTS = (F.dropout, torch.dropout, torch.dropout_)
CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
ALPHA = (F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_)
ALPHA_CHANNELS = (F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_)
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class OnePassOnly(Exception):
    """Several samples cannot share one pass of this network."""


class Streams:
    """Random words for the dropouts of a network, in the order of its forward pass.

    A dropout's words depend on the seed, on its place in that order and on the sample, so that samples are the first of
    more; samples must be asked for in their order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sources: dict[int, np.random.SFC64] = {}

    def keep(self, place: int, samples: int, shape: Sequence[int], kept: int) -> Tensor:
        """(samples, *shape) of ones, with probability kept / 65536, and zeros."""
        source = self.sources.get(place)
        if source is None:
            source = self.sources[place] = np.random.SFC64(derive(self.seed, "dropout", place))
        units = math.prod(shape)
        words = -(-units // PER_WORD)  # whole words for each sample
        bits = source.random_raw(samples * words).view(np.int16).reshape(samples, words * PER_WORD)[:, :units]
        return torch.from_numpy(bits >= LEVELS // 2 - kept).view(torch.uint8).view(samples, *shape)


class Dropping(TorchFunctionMode):
    """Inside the block every dropout is active, whatever its module's mode, and draws its masks from `streams`.

    The pass is for `samples` samples, from number `first` on, whose rows are member-major along the axis that `axes`
    gives for each dropout in the order of the pass (see `row_axes`). `late` says that the inputs are not repeated yet:
    the first dropout then returns as many copies of what it gets as there are samples, so that all before it is
    computed once. `per_example=False` draws one mask a sample for all rows.
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
        self.shapes: list[torch.Size] = []  # of what was dropped from
        self.active = 0  # calls with a rate above 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls instead of `func`."""
        handler = HANDLERS.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(self, func, *args, **(kwargs or {}))

    def elements(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Units to zero."""
        return self.drop(input, p, input.shape, _zeroed, inplace)

    def channels(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Whole channels to zero."""
        return self.drop(input, p, _of_channels(input), _zeroed, inplace)

    def alpha(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Units to SELU's floor."""
        return self.drop(input, p, input.shape, _floored, inplace)

    def alpha_channels(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Whole channels to SELU's floor."""
        return self.drop(input, p, _of_channels(input), _floored, inplace)

    def attention(self, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`F.multi_head_attention_forward`, whose own dropout is ours: its code, run with another `dropout`."""
        if not _rate_of_attention(args, kwargs):
            plain: tuple[Tensor, Tensor | None] = func(*args, **kwargs)
            return plain
        scope = {
            **vars(F),
            "has_torch_function": lambda _: False,
            "dropout": lambda weights, p: self.elements(None, weights, p),
        }
        code = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
        # Only with weights is dropout a call of its own.
        output, weights = code(*args, **{**kwargs, "training": True, "need_weights": True})
        return output, weights if kwargs.get("need_weights", True) else None

    def product_attention(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Attention by hand that drops whatever the mode is: torch draws, one sample a pass."""
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        attended: Tensor = self.foreign(func, args, kwargs) if rate else func(*args, **kwargs)
        return attended

    def recurrent(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Dropout between the layers of nn.LSTM and its kin: torch draws, one sample a pass."""
        place = next((index for index, value in enumerate(args) if isinstance(value, float)), None)
        if place is None or not args[place]:
            return func(*args, **kwargs)
        return self.foreign(func, (*args[: place + 1], True, *args[place + 2 :]), kwargs)  # train=True

    def foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that draws by itself, from torch's generators, seeded for it."""
        if self.samples > 1:
            raise OnePassOnly
        self.active += 1
        with torch.random.fork_rng():
            torch.manual_seed(derive(self.streams.seed, "torch's dropout", self.active, self.first))
            return func(*args, **kwargs)

    def drop(self, x: Tensor, rate: float, shape: Sequence[int], combine: Combine, inplace: bool = False) -> Tensor:
        """`x` with a mask of `shape`, which is x's or has ones in it, for each sample."""
        if inplace:  # who asks for it may use the input afterwards
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
        own = list(shape)  # of one sample's mask
        if axis is not None:
            own[axis] = x.shape[axis] // (1 if self.late else self.samples) if self.per_example else 1
        keep = self.streams.keep(place, self.samples, own, kept).to(x.device)
        if self.late:
            self.late = False
            return combine(x.unsqueeze(0), keep, kept / LEVELS).flatten(0, 1)
        if axis is None or self.samples == 1:
            return combine(x, keep[0], kept / LEVELS)
        parts = x.unflatten(axis, (self.samples, -1))
        return combine(parts, keep.movedim(0, axis), kept / LEVELS).flatten(axis, axis + 1)


def row_axes(few: Sequence[torch.Size], more: Sequence[torch.Size]) -> list[int | None]:
    """The axis of the examples in what is dropped from: the one that is longer in a pass with more of them."""
    return [
        next((axis for axis, size in enumerate(shape) if axis < len(other) and size < other[axis]), None)
        for shape, other in zip(few, more, strict=False)
    ]


Combine = Callable[[Tensor, Tensor, float], Tensor]  # of units, what is kept, and the probability to be kept

HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTS, Dropping.elements),
    **dict.fromkeys(CHANNELS, Dropping.channels),
    **dict.fromkeys(ALPHA, Dropping.alpha),
    **dict.fromkeys(ALPHA_CHANNELS, Dropping.alpha_channels),
    **dict.fromkeys(RECURRENT, Dropping.recurrent),
    F.multi_head_attention_forward: Dropping.attention,
    F.scaled_dot_product_attention: Dropping.product_attention,
}


def _zeroed(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """x / probability where kept; 0 elsewhere, also where everything is dropped."""
    return x * (1 / probability if probability else 0.0) * keep


def _floored(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """SELU's floor where dropped, then shifted and scaled to the mean 0 and variance 1 of self-normalising units.

    G. Klambauer et al., arXiv:1706.02515.
    """
    rate = 1 - probability
    scale = 1 / math.sqrt(probability * (1 + rate * SELU_FLOOR**2)) if probability else 0.0
    return scale * (x * keep + SELU_FLOOR * (1 - keep.to(x.dtype)) - SELU_FLOOR * rate)


def _of_channels(x: Tensor) -> list[int]:
    """(N, C, 1, ...)."""
    return [*x.shape[:2], *(1,) * (x.ndim - 2)]


def _rate_of_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[10] if len(args) > 10 else kwargs["dropout_p"])


def dropout_rates(network: nn.Module) -> dict[str, float]:
    """The rates above 0 of the modules that drop, by name."""
    rates = {}
    for name, module in network.named_modules():
        if isinstance(module, _DropoutNd):
            rates[name] = float(module.p)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            rates[name] = float(module.dropout)
    return {name: rate for name, rate in rates.items() if rate > 0}
