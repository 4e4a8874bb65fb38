"""Means and standard deviations of layer outputs on training examples, in one network or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.tree import count_examples, join_examples, layout, split_examples, to_device
from enfold.engines.modes import eval_mode
from enfold.evaluate import member_logits
from enfold.merge.common.layers import channel_axis
from enfold.train.batch_norm import TRACKING

BATCH = 256
TOGETHER = 32  # examples for which the layer outputs of all networks are in memory at the same time
SEVERAL = 2  # examples that are counted in a batch whose examples cannot be told apart
SAME = 1e-3  # relative to the outputs' norm; the epsilon of norms changes outputs by less
Moments = tuple[Tensor, Tensor]  # means and standard deviations, (units,) each


class Sums:
    """The number of samples of units, their sums and the sums of their squares."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, units: Tensor) -> None:
        """Add samples, (units, samples)."""
        units = units.double()
        self.count += units.shape[1]
        self.total = self.total.to(units.device) + units.sum(1)
        self.squares = self.squares.to(units.device) + units.square().sum(1)

    def moments(self) -> Moments:
        """Return means and standard deviations of all samples."""
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean.square()).clamp_min(0).sqrt()


@dataclass
class LayerStatistics:
    """Statistics of the layers of several networks for the same inputs."""

    each: list[dict[str, Sums]]  # by network and layer
    mean: dict[str, Sums] = field(default_factory=dict)  # by layer, for the weighted mean of all networks' units
    unequal: set[str] = field(default_factory=set)  # layers without a mean, as networks show different samples
    calls: dict[tuple[str, ...], None] = field(default_factory=dict)  # orders of layer calls in a forward pass
    examples: int = 0

    @property
    def names(self) -> list[str]:
        """The layers that all networks call, in the order of their calls."""
        called = dict.fromkeys(name for order in sorted(self.calls, key=len, reverse=True) for name in order)
        return [name for name in called if all(name in sums and sums[name].count > 1 for sums in self.each)]

    @property
    def is_sequential(self) -> bool:
        """True if every pass calls the same layers in the same order, each once."""
        return len(self.calls) == 1 and all(len(set(order)) == len(order) for order in self.calls)

    def run(self, index: int, network: nn.Module, names: Sequence[str], inputs: Any, hold: bool) -> dict[str, Tensor]:
        """Run one network; with `hold`, return the outputs of each layer in all its calls, (units, samples).

        Args:
            index: The index of the network.
            network: The network.
            names: The names of the layers.
            inputs: One batch of inputs.
            hold: Whether outputs are returned.
        """
        held: dict[str, Tensor] = {}
        order: list[str] = []

        def record(name: str, units: Tensor) -> None:
            order.append(name)
            self.each[index].setdefault(name, Sums()).add(units)
            if hold:  # a copy, as the next layer may work in place
                held[name] = torch.cat([*([held[name]] if name in held else []), units], dim=1)

        with _observe(network, names, record):
            member_logits(network, inputs)
        self.calls[tuple(order)] = None
        return held

    def mix(self, every: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> None:
        """Add the weighted mean of the outputs of all networks."""
        for name in {name for held in every for name in held}:
            parts = [held[name] for held in every if name in held]
            if len(parts) < len(every) or len({part.shape for part in parts}) > 1:
                self.unequal.add(name)
            else:
                mean = sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))
                self.mean.setdefault(name, Sums()).add(mean)


def measure_networks(
    networks: Sequence[nn.Module],
    names: Sequence[str],
    batches: Iterable[Any],
    weights: Sequence[float] | None = None,
) -> LayerStatistics:
    """Run all batches through all networks; with weights, also measure the weighted mean of their units.

    Args:
        networks: The networks.
        names: The names of the layers.
        batches: The batches of inputs.
        weights: The weights of the members in the mean; equal by default.
    """
    found = LayerStatistics([{} for _ in networks])
    for inputs in batches:
        found.examples += _size(inputs)
        for part in (inputs,) if weights is None else split_examples(inputs, TOGETHER):
            every = [found.run(k, one, names, part, weights is not None) for k, one in enumerate(networks)]
            if weights is not None:
                found.mix(every, weights)
    return found


class _Enough(BaseException):  # not an Exception, which a network's code may catch
    """The layer that is measured was called."""


def measure_layer(network: nn.Module, name: str, batches: Iterable[Any], *, once: bool) -> Sums:
    """Measure the outputs of one layer; with `once`, a forward pass stops after its first call.

    Args:
        network: The network.
        name: The name of the layer.
        batches: The batches of inputs.
        once: Whether a forward pass stops after the first call of the layer.
    """
    sums = Sums()

    def record(_: str, units: Tensor) -> None:
        sums.add(units)
        if once:
            raise _Enough

    with _observe(network, [name], record):
        for inputs in batches:
            with suppress(_Enough):
                member_logits(network, inputs)
    return sums


def layers_cancelled_by_norms(network: nn.Module, names: Sequence[str], data: Data, seed: int) -> set[str]:
    """Return the layers whose units may be scaled and shifted without effect, because batch norms cancel it.

    Args:
        network: The network.
        names: The names of the layers.
        data: The data.
        seed: The seed.
    """
    norms = [layer for layer in network.modules() if isinstance(layer, TRACKING)]
    inputs = next(batches_of(data, next(network.parameters()).device, seed)) if norms and names else torch.empty(0)
    found: set[str] = set()
    if _size(inputs) > 1:
        with eval_mode(network), _batch_statistics(network, norms):
            plain = member_logits(network, inputs)
            for name in names:
                with _hook(network.get_submodule(name), _rescale):
                    change = member_logits(network, inputs) - plain
                if float(change.norm()) <= SAME * float(plain.norm()):
                    found.add(name)
    return found


def _size(inputs: Any) -> int:
    size = count_examples(inputs)
    return SEVERAL if size is None else size


def _rescale(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    units = _units(layer, output)
    ramp = torch.linspace(0.5, 2, len(units)).to(units)
    shape = [1] * output.ndim
    shape[channel_axis(layer, output)] = -1
    return output * ramp.view(shape) + ((ramp - 1) * units.std()).view(shape)


def batches_of(data: Data, device: torch.device, seed: int) -> Iterator[Any]:
    """Yield the training inputs with small batches combined; every pass yields the same, also for a loader that draws,
    unless it has its own generator."""
    with torch.random.fork_rng(devices=[]):
        yield from _pool(Order(BATCH, seed=seed).batches(data, epoch=0), device)


def _pool(batches: Iterable[Batch], device: torch.device) -> Iterator[Any]:
    held: list[Any] = []
    size = 0
    for batch in batches:
        inputs = to_device(batch.inputs, device)
        count = count_examples(inputs)
        if held and (count is None or layout(held[0]) != layout(inputs)):
            yield join_examples(held)
            held, size = [], 0
        if count is None:
            yield inputs
            continue
        held, size = [*held, inputs], size + count
        if size >= BATCH:
            yield join_examples(held)
            held, size = [], 0
    if held:
        yield join_examples(held)


@contextmanager
def _observe(network: nn.Module, names: Sequence[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the outputs of these layers, (units, samples)."""

    def seeing(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda layer, _, output: see(name, _units(layer, output))

    with ExitStack() as stack:
        stack.enter_context(eval_mode(network))
        for name in names:
            stack.enter_context(_hook(network.get_submodule(name), seeing(name)))
        yield


def _units(layer: nn.Module, output: Tensor) -> Tensor:
    """Return the units as (units, samples)."""
    return output.movedim(channel_axis(layer, output), 0).flatten(1)


@contextmanager
def _hook(layer: nn.Module, hook: Callable[[nn.Module, object, Tensor], Tensor | None]) -> Iterator[None]:
    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _batch_statistics(network: nn.Module, norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch norms use the statistics of each batch without changing their running statistics."""
    held = {name: buffer.clone() for name, buffer in network.named_buffers()}
    for layer in norms:
        layer.training = True
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(held[name])
