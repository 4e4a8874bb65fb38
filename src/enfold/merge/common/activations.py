"""Activations: moments of the hidden units of several networks on training examples, group by group.

    n = (sample, position),   x_n = units of all M networks, concatenated, (M d)                                  (1)
    μ = E[x],   S = E[x xᵀ],   covariance S - μ μᵀ,   correlation = covariance / (σ σᵀ)                            (2)

Units of a group are observed as inputs of layers, after the non-linearity, and otherwise as outputs; where they are
observed at several places of a network (as in a residual stream), all places have equal weight. Positions of a map, and
the inputs that a flatten makes of one unit, are further samples of it. Units are compared only where all networks show
the same samples: not where samples are channels of another group, whose order differs between networks, nor where
samples are selected by values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.tree import count_examples, to_device
from enfold.engines.modes import eval_mode
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.merge.common.inputs import first_inputs, select_few
from enfold.merge.common.layers import channel_axis, consumed_axis, produced_axis, shows_outputs
from enfold.symmetry import Axis, Group, Symmetry

Side = Literal["inputs", "outputs"]
"""Where units are observed first: as inputs of the next layers, or as outputs of the layers that produce them."""

COLUMNS = 4096  # samples of one batch at one place; more are subsampled evenly
ROUNDING = 1e-5  # relative difference of two equal values
BATCH = 128
AXES = 5  # maximum number of axes of a layer's input or output


@dataclass(frozen=True)
class Place:
    """One layer at which a group's units are observed."""

    layer: str
    side: Side
    axis: Axis  # the units along the layer's channels
    channels: int | None = None  # axis of the units in the observed tensor, from its end; None: that of PyTorch's class

    def units(self, layer: nn.Module, value: Tensor) -> Tensor | None:
        """Return (units, samples), or None if the axis of channels is too short or missing."""
        number = channel_axis(layer, value) if self.channels is None else value.ndim - self.channels
        if not 0 <= number < value.ndim or value.shape[number] < self.axis.offset + self.axis.length:
            return None
        return self.axis.units_first(value.detach().movedim(number, 0)).flatten(1)


@dataclass
class Moments:
    """Equation (2) of one group, for M networks of d units; one entry for each place."""

    num_networks: int
    counts: list[float]
    sums: list[Tensor]  # (M d,)
    products: list[Tensor]  # (M d, M d)

    @property
    def size(self) -> int:
        """d."""
        return len(self.sums[0]) // self.num_networks

    def block(self, matrix: Tensor, one: int, other: int) -> Tensor:
        """Return the block of a (M d, M d) matrix between two networks, (d, d).

        Args:
            matrix: The matrix.
            one: The index of the first network.
            other: The index of the second network.
        """
        rows, columns = (slice(index * self.size, (index + 1) * self.size) for index in (one, other))
        return matrix[rows, columns]

    def second(self) -> Tensor:
        """Return S, (M d, M d)."""
        return self._mean([product / count for product, count in zip(self.products, self.counts, strict=True)])

    def covariance(self) -> Tensor:
        """Return the covariance, (M d, M d), around the mean of each place."""
        return self._mean(self._covariances())

    def correlation(self) -> Tensor:
        """Return the correlation, (M d, M d): 0 with a constant unit, but 1 for two constant units of equal value."""
        means = [total / count for total, count in zip(self.sums, self.counts, strict=True)]
        return self._mean([_correlation(*each) for each in zip(self._covariances(), means, strict=True)])

    def _covariances(self) -> list[Tensor]:
        found = []
        for count, total, product in zip(self.counts, self.sums, self.products, strict=True):
            mean = total / count
            covariance = product / count
            squares = covariance.diagonal().clone()
            covariance -= mean[:, None] * mean
            constant = covariance.diagonal() <= 1e-12 * squares  # rounding
            covariance[constant] = 0
            covariance[:, constant] = 0
            found.append(covariance)
        return found

    @staticmethod
    def _mean(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0) if len(parts) > 1 else parts[0]


def _correlation(covariance: Tensor, means: Tensor) -> Tensor:
    """Compute the correlation in place of the covariance."""
    spread = covariance.diagonal().clamp_min(0).sqrt()
    constant = (spread == 0).nonzero().squeeze(1)
    spread[constant] = 1
    found = covariance.div_(spread[:, None] * spread)
    value = means[constant]
    near = ROUNDING * torch.maximum(value[:, None].abs(), value.abs())
    found[constant[:, None], constant] = ((value[:, None] - value).abs() <= near).to(found)
    return found


def find_places(network: nn.Module, symmetry: Symmetry, first: Side = "inputs") -> dict[str, list[Place]]:
    """Return the places at which each group's units are observed, without groups that no layer shows."""
    if first not in get_args(Side):
        raise EnfoldError(f"watch must be 'inputs' or 'outputs', got {first!r}: choose one")
    modules = dict(network.named_modules(remove_duplicate=False))
    found = {}
    for group in symmetry.groups:
        sides = {side: list(_places(group, modules, side)) for side in get_args(Side)}
        other: Side = "outputs" if first == "inputs" else "inputs"
        places = sides[first] or sides[other]
        if places:
            found[group.name] = places
    return found


def _places(group: Group, modules: dict[str, nn.Module], side: Side) -> Iterator[Place]:
    seen: set[tuple[str, Axis]] = set()
    for axis in group.axes:
        name, _, kind = axis.name.rpartition(".")
        layer = modules.get(name)
        if layer is None or kind != "weight":
            continue
        wanted = consumed_axis(layer) if side == "inputs" else produced_axis(layer) if shows_outputs(layer) else None
        roles = ("consumes", "both") if side == "inputs" else ("produces", "meets", "both")
        along = replace(axis, axis=0)
        if axis.axis == wanted and axis.role in roles and (name, along) not in seen:
            seen.add((name, along))
            yield Place(name, side, along)


@torch.no_grad()
def comparable_places(
    network: nn.Module, moved: nn.Module, orders: Mapping[str, Tensor], places: dict[str, list[Place]], data: Data
) -> dict[str, list[Place]]:
    """Return the places that show the same samples of each unit after groups were permuted.

    Omitted are layers that the network does not call, and layers that use permuted channels as samples, such as those
    of mixers. The axis of channels is the one along which units are observed to move: a subclass may use another axis
    than its PyTorch class.

    Args:
        network: The network.
        moved: The same network with permuted units.
        orders: The permutations by group.
        places: The observed layers by group.
        data: The data.
    """
    tried = {name: [each for place in some for each in _along_each_axis(place)] for name, some in places.items()}
    seen = []
    with torch.random.fork_rng(devices=[]):  # a loader and a network may use the global generator
        example = first_inputs(data)
        for one in (network, moved):
            torch.default_generator.manual_seed(0)
            seen.append(_units([one], tried, example)[0])
    found: dict[str, dict[tuple[str, Axis], Place]] = {}
    for (name, index), units in seen[0].items():
        got = seen[1].get((name, index), units[:0])
        if got.shape != units.shape:
            continue
        expected = units[orders[name]] if name in orders else units
        near = torch.finfo(units.dtype).eps ** 0.5 * float(units.norm())
        if not float((got - expected).norm()) > near:  # `measure_moments` reports values that are not finite
            place = tried[name][index]
            found.setdefault(name, {}).setdefault((place.layer, place.axis), place)
    return {name: list(some.values()) for name, some in found.items()}


def _along_each_axis(place: Place) -> list[Place]:
    """Return the place and, unless its axis of channels is known, the place with units along any other axis."""
    return [place, *(replace(place, channels=k) for k in range(1, AXES + 1) if place.channels is None)]


@torch.no_grad()
def measure_moments(
    networks: Sequence[nn.Module],
    places: dict[str, list[Place]],
    data: Data,
    *,
    examples: int = 4096,
    seed: int = 0,
) -> dict[str, Moments]:
    """Return equation (2) by group, over a number of training examples, in eval mode.

    Groups that are never observed are omitted, and so are places with different numbers of samples in the networks.

    Args:
        networks: The networks.
        places: The observed layers by group.
        data: The data.
        examples: The number of training examples.
        seed: The seed.
    """
    if examples < 1:
        raise EnfoldError(f"examples must be 1 or more, got {examples}: change examples")
    gathered: dict[tuple[str, int], tuple[float, Tensor, Tensor]] = {}
    unequal: set[tuple[str, int]] = set()
    for inputs in _first(examples, Order(BATCH, seed=seed).batches(data, epoch=0)):
        seen, differing = _units(networks, places, inputs)
        unequal |= differing
        for key, units in seen.items():
            values = units.double().cpu()
            part = (float(values.shape[1]), values.sum(1), values @ values.mT)
            held = gathered.get(key)
            gathered[key] = part if held is None else (held[0] + part[0], held[1] + part[1], held[2] + part[2])
    found: dict[str, Moments] = {}
    for (name, index), (count, total, product) in gathered.items():
        if (name, index) in unequal or not count:
            continue
        if not bool(product.diagonal().isfinite().all()):
            member = int(product.diagonal().isfinite().logical_not().nonzero()[0]) // (len(product) // len(networks))
            raise EnfoldError(
                f"activations must be finite, but those of '{name}' in member {member} are not: remove that member"
            )
        one = found.setdefault(name, Moments(len(networks), [], [], []))
        one.counts.append(count)
        one.sums.append(total)
        one.products.append(product)
    return found


def _first(examples: int, batches: Iterable[Batch]) -> Iterator[Any]:
    """Yield the inputs of the first examples, in batches; a batch whose examples cannot be told apart is complete."""
    for batch in batches:
        yield select_few(batch.inputs, examples)
        examples -= count_examples(batch.inputs) or len(batch)
        if examples <= 0:
            return


def _units(
    networks: Sequence[nn.Module], places: dict[str, list[Place]], inputs: Any
) -> tuple[dict[tuple[str, int], Tensor], set[tuple[str, int]]]:
    """Return the units of all networks for one batch, (M d, samples), by group and place, and the places at which the
    number of samples differs, as for tokens that are selected by their values."""
    every: list[dict[tuple[str, int], Tensor]] = []
    for network in networks:
        seen: dict[tuple[str, int], list[Tensor]] = {}
        with ExitStack() as stack:
            stack.enter_context(eval_mode(network))
            for name, some in places.items():
                for index, place in enumerate(some):
                    stack.callback(_record(network, place, seen.setdefault((name, index), [])))
            member_logits(network, to_device(inputs, next(network.parameters()).device))
        every.append({key: torch.cat(parts, dim=1) for key, parts in seen.items() if parts})
    differing = {
        key for key in set().union(*every) if len({one[key].shape[1] if key in one else 0 for one in every}) > 1
    }
    equal = {key: [one[key] for one in every] for key in every[0] if key not in differing}
    return {key: _subsample(torch.cat(units)) for key, units in equal.items()}, differing


def _record(network: nn.Module, place: Place, seen: list[Tensor]) -> Callable[[], None]:
    layer = network.get_submodule(place.layer)

    def record(value: Any) -> None:
        units = place.units(layer, value) if isinstance(value, Tensor) else None
        if units is not None:
            seen.append(units.clone())  # the next layer may modify it in place

    def inputs(_: nn.Module, given: tuple[Any, ...]) -> None:
        record(given[0] if given else None)

    def outputs(_: nn.Module, __: object, value: Any) -> None:
        record(value)

    if place.side == "inputs":
        return layer.register_forward_pre_hook(inputs).remove
    return layer.register_forward_hook(outputs).remove


def _subsample(units: Tensor) -> Tensor:
    step = max(1, -(-units.shape[1] // COLUMNS))
    return units[:, ::step]
