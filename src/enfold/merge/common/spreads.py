"""Spreads: means and spreads of what layers return for the training part, in one network or in several together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.engines.modes import evaluating
from enfold.evaluate import member_logits
from enfold.merge.common.layers import channel_axis
from enfold.train.batch_norm import TRACKING

BATCH = 256
TOGETHER = 32  # examples for which what layers return is held for all networks at once
SAME = 1e-3  # a part of the outputs' size: what norms add to variances lets them differ by less
Moments = tuple[Tensor, Tensor]  # means and spreads, (units,) each


class Sums:
    """How many numbers units gave, their sums and those of their squares."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, units: Tensor) -> None:
        """(units, samples)."""
        units = units.double()
        self.count += units.shape[1]
        self.total = self.total.to(units.device) + units.sum(1)
        self.squares = self.squares.to(units.device) + units.square().sum(1)

    def moments(self) -> Moments:
        """Of the numbers so far."""
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean.square()).clamp_min(0).sqrt()


@dataclass
class Seen:
    """What layers of several networks return for the same inputs."""

    each: list[dict[str, Sums]]  # by network and layer
    mean: dict[str, Sums] = field(default_factory=dict)  # by layer, of the weighted mean of all networks' units
    apart: set[str] = field(default_factory=set)  # layers that have no mean, because networks show other samples
    calls: dict[tuple[str, ...], None] = field(default_factory=dict)  # of layers, in their order, as passes have them
    examples: int = 0

    @property
    def names(self) -> list[str]:
        """The layers that all networks call, in the order of their calls."""
        called = dict.fromkeys(name for order in sorted(self.calls, key=len, reverse=True) for name in order)
        return [name for name in called if all(name in sums and sums[name].count > 1 for sums in self.each)]

    @property
    def plain(self) -> bool:
        """Whether every pass calls the same layers in the same order, each once."""
        return len(self.calls) == 1 and all(len(set(order)) == len(order) for order in self.calls)

    def run(
        self, index: int, network: nn.Module, names: Sequence[str], inputs: Tensor, hold: bool
    ) -> dict[str, Tensor]:
        """One network's pass; if it is to be held, what each layer returned in all its calls, (units, samples)."""
        held: dict[str, Tensor] = {}
        order: list[str] = []

        def see(name: str, units: Tensor) -> None:
            order.append(name)
            self.each[index].setdefault(name, Sums()).add(units)
            if hold:  # a copy: what comes next may work in place
                held[name] = torch.cat([*([held[name]] if name in held else []), units], dim=1)

        with _watched(network, names, see):
            member_logits(network, inputs)
        self.calls[tuple(order)] = None
        return held

    def mix(self, every: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> None:
        """The weighted mean of what all networks returned in a pass."""
        for name in {name for held in every for name in held}:
            parts = [held[name] for held in every if name in held]
            if len(parts) < len(every) or len({part.shape for part in parts}) > 1:
                self.apart.add(name)
            else:
                mean = sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))
                self.mean.setdefault(name, Sums()).add(mean)


def seen(
    networks: Sequence[nn.Module],
    names: Sequence[str],
    batches: Iterable[Tensor],
    weights: Sequence[float] | None = None,
) -> Seen:
    """All batches through all networks; with weights also means, a few examples at a time, since layers are held."""
    found = Seen([{} for _ in networks])
    for inputs in batches:
        found.examples += len(inputs)
        for part in (inputs,) if weights is None else inputs.split(TOGETHER):
            every = [found.run(k, one, names, part, weights is not None) for k, one in enumerate(networks)]
            if weights is not None:
                found.mix(every, weights)
    return found


class _Enough(BaseException):  # no Exception, which a network's own code may catch
    """The layer that is measured has been called."""


def measured(network: nn.Module, name: str, batches: Iterable[Tensor], *, once: bool) -> Sums:
    """What one layer returns; where it is called once in a pass, nothing behind it is run."""
    sums = Sums()

    def see(_: str, units: Tensor) -> None:
        sums.add(units)
        if once:
            raise _Enough

    with _watched(network, [name], see):
        for inputs in batches:
            with suppress(_Enough):
                member_logits(network, inputs)
    return sums


def undone(network: nn.Module, names: Sequence[str], data: Data, seed: int) -> set[str]:
    """The layers whose units may be scaled and shifted without a trace, because batch norms take it out again."""
    norms = [layer for layer in network.modules() if isinstance(layer, TRACKING)]
    inputs = next(batches_of(data, next(network.parameters()).device, seed)) if norms and names else torch.empty(0)
    found: set[str] = set()
    if len(inputs) > 1:
        with evaluating(network), _normalising(network, norms):
            plain = member_logits(network, inputs)
            for name in names:
                with _hooked(network.get_submodule(name), _changed):
                    change = member_logits(network, inputs) - plain
                if float(change.norm()) <= SAME * float(plain.norm()):
                    found.add(name)
    return found


def _changed(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    units = _units(layer, output)
    ramp = torch.linspace(0.5, 2, len(units)).to(units)
    shape = [1] * output.ndim
    shape[channel_axis(layer, output)] = -1
    return output * ramp.view(shape) + ((ramp - 1) * units.std()).view(shape)


def batches_of(data: Data, device: torch.device, seed: int) -> Iterator[Tensor]:
    """The inputs of the training part, small batches taken together; the same ones in each pass, also of a loader that
    draws, unless it has a generator of its own."""
    with torch.random.fork_rng(devices=[]):
        yield from _pooled(Order(BATCH, seed=seed).batches(data, epoch=0), device)


def _pooled(batches: Iterable[Batch], device: torch.device) -> Iterator[Tensor]:
    held: list[Tensor] = []
    for batch in batches:
        if held and held[0].shape[1:] != batch.inputs.shape[1:]:
            yield torch.cat(held)
            held = []
        held.append(batch.inputs.to(device))
        if sum(map(len, held)) >= BATCH:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)


@contextmanager
def _watched(network: nn.Module, names: Sequence[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """What these layers return, (units, samples), call by call."""

    def seeing(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda layer, _, output: see(name, _units(layer, output))

    with ExitStack() as stack:
        stack.enter_context(evaluating(network))
        for name in names:
            stack.enter_context(_hooked(network.get_submodule(name), seeing(name)))
        yield


def _units(layer: nn.Module, output: Tensor) -> Tensor:
    """(units, samples)."""
    return output.movedim(channel_axis(layer, output), 0).flatten(1)


@contextmanager
def _hooked(layer: nn.Module, hook: Callable[[nn.Module, object, Tensor], Tensor | None]) -> Iterator[None]:
    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _normalising(network: nn.Module, norms: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms use each batch's own statistics and keep what they hold."""
    held = {name: buffer.clone() for name, buffer in network.named_buffers()}
    for layer in norms:
        layer.training = True
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(held[name])
