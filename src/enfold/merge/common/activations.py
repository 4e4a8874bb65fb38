"""Activations: how hidden units of several networks move together over the training part, group by group.

    n = (sample, place),   x_n = units of all M networks behind each other, (M d)                                  (1)
    μ = E[x],   S = E[x xᵀ],   covariance S - μ μᵀ,   correlation = covariance / (σ σᵀ)                            (2)

Units of a group are watched where layers take them in, behind the non-linearity, and else where they come out of a
layer; seen at several places of a network (a residual stream is), each place counts the same. The places of a map and
what a flatten put into one unit are more samples of it. Units are compared where all networks show the same samples:
not where the channels of another group are samples, each network's in its own order, nor where values choose them.
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
from enfold.engines.modes import evaluating
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.merge.common.layers import channel_axis, consumed_axis, produced_axis, shows_outputs
from enfold.merge.common.states import example_of
from enfold.symmetry import Axis, Group, Symmetry

Watched = Literal["inputs", "outputs"]
"""Where units are watched first: as inputs of the next layers, or as outputs of the layers that make them."""

COLUMNS = 4096  # of one batch at one place; more are thinned out evenly
ROUNDING = 1e-5  # of two values that are the same
BATCH = 128
AXES = 5  # at most, of what a layer takes or returns


@dataclass(frozen=True)
class Place:
    """One layer at which a group's units are seen."""

    layer: str
    side: Watched
    axis: Axis  # the units along the layer's channels
    channels: int | None = None  # the axis of what is seen along which they lie, from its end; None: by PyTorch's class

    def units(self, layer: nn.Module, value: Tensor) -> Tensor | None:
        """(units, samples); None where the axis of channels is too short for them, or not there."""
        number = channel_axis(layer, value) if self.channels is None else value.ndim - self.channels
        if not 0 <= number < value.ndim or value.shape[number] < self.axis.offset + self.axis.length:
            return None
        return self.axis.units_first(value.detach().movedim(number, 0)).flatten(1)


@dataclass
class Moments:
    """Equation (2) of one group, each for M networks of d units; one entry a place in which they were seen."""

    num_networks: int
    counts: list[float]
    sums: list[Tensor]  # (M d,)
    products: list[Tensor]  # (M d, M d)

    @property
    def size(self) -> int:
        """d."""
        return len(self.sums[0]) // self.num_networks

    def block(self, matrix: Tensor, one: int, other: int) -> Tensor:
        """The part of a (M d, M d) matrix that is between two networks, (d, d)."""
        rows, columns = (slice(index * self.size, (index + 1) * self.size) for index in (one, other))
        return matrix[rows, columns]

    def second(self) -> Tensor:
        """S, (M d, M d)."""
        return self._mean([product / count for product, count in zip(self.products, self.counts, strict=True)])

    def covariance(self) -> Tensor:
        """(M d, M d), around the mean of each place."""
        return self._mean(self._covariances())

    def correlation(self) -> Tensor:
        """(M d, M d); 0 with a unit that never moves, but 1 of two of them that stay at the same value."""
        means = [total / count for total, count in zip(self.sums, self.counts, strict=True)]
        return self._mean([_correlation(*each) for each in zip(self._covariances(), means, strict=True)])

    def _covariances(self) -> list[Tensor]:
        found = []
        for count, total, product in zip(self.counts, self.sums, self.products, strict=True):
            mean = total / count
            covariance = product / count
            squares = covariance.diagonal().clone()
            covariance -= mean[:, None] * mean
            still = covariance.diagonal() <= 1e-12 * squares  # what rounding leaves
            covariance[still] = 0
            covariance[:, still] = 0
            found.append(covariance)
        return found

    @staticmethod
    def _mean(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0) if len(parts) > 1 else parts[0]


def _correlation(covariance: Tensor, means: Tensor) -> Tensor:
    """In the place of the covariance."""
    spread = covariance.diagonal().clamp_min(0).sqrt()
    still = (spread == 0).nonzero().squeeze(1)
    spread[still] = 1
    found = covariance.div_(spread[:, None] * spread)
    value = means[still]
    near = ROUNDING * torch.maximum(value[:, None].abs(), value.abs())
    found[still[:, None], still] = ((value[:, None] - value).abs() <= near).to(found)
    return found


def watched(network: nn.Module, symmetry: Symmetry, first: Watched = "inputs") -> dict[str, list[Place]]:
    """Where each group's units are seen; a group that no layer shows is left out."""
    if first not in get_args(Watched):
        raise EnfoldError(f"units are watched as inputs or outputs of layers, got {first!r}: choose one")
    modules = dict(network.named_modules(remove_duplicate=False))
    found = {}
    for group in symmetry.groups:
        sides = {side: list(_places(group, modules, side)) for side in get_args(Watched)}
        other: Watched = "outputs" if first == "inputs" else "inputs"
        places = sides[first] or sides[other]
        if places:
            found[group.name] = places
    return found


def _places(group: Group, modules: dict[str, nn.Module], side: Watched) -> Iterator[Place]:
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
def comparable(
    network: nn.Module, moved: nn.Module, orders: Mapping[str, Tensor], places: dict[str, list[Place]], data: Data
) -> dict[str, list[Place]]:
    """The places that show the same samples of each unit after groups were put in these orders.

    No layers that the network does not call, and none that take the channels of a map as samples of its places, as
    mixers do, if the channels moved. The axis of channels is the one along which units are seen to move: a class of
    the user's own may have another than the PyTorch class that it extends.
    """
    tried = {name: [each for place in some for each in _along_each_axis(place)] for name, some in places.items()}
    seen = []
    with torch.random.fork_rng(devices=[]):  # a loader of the user's own may draw, and so may a network
        example = example_of(data)
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
        if not float((got - expected).norm()) > near:  # what is not finite is for `moments` to name
            place = tried[name][index]
            found.setdefault(name, {}).setdefault((place.layer, place.axis), place)
    return {name: list(some.values()) for name, some in found.items()}


def _along_each_axis(place: Place) -> list[Place]:
    """The place as it is, and, unless its axis of channels is known, with units along any axis of what is seen."""
    return [place, *(replace(place, channels=k) for k in range(1, AXES + 1) if place.channels is None)]


@torch.no_grad()
def moments(
    networks: Sequence[nn.Module],
    places: dict[str, list[Place]],
    data: Data,
    *,
    examples: int = 4096,
    seed: int = 0,
) -> dict[str, Moments]:
    """Equation (2) by group, over so many examples of the training part, in eval mode.

    Without groups that are never seen, and without places that show some networks more samples than others.
    """
    if examples < 1:
        raise EnfoldError(f"units are watched on examples, got examples={examples}: pass 1 or more")
    gathered: dict[tuple[str, int], tuple[float, Tensor, Tensor]] = {}
    apart: set[tuple[str, int]] = set()
    for inputs in _first(examples, Order(BATCH, seed=seed).batches(data, epoch=0)):
        seen, differing = _units(networks, places, inputs)
        apart |= differing
        for key, units in seen.items():
            values = units.double().cpu()
            part = (float(values.shape[1]), values.sum(1), values @ values.mT)
            held = gathered.get(key)
            gathered[key] = part if held is None else (held[0] + part[0], held[1] + part[1], held[2] + part[2])
    found: dict[str, Moments] = {}
    for (name, index), (count, total, product) in gathered.items():
        if (name, index) in apart or not count:
            continue
        if not bool(product.diagonal().isfinite().all()):
            member = int(product.diagonal().isfinite().logical_not().nonzero()[0]) // (len(product) // len(networks))
            raise EnfoldError(
                f"units are compared by finite answers, but those of '{name}' in member {member} are not: leave it out"
            )
        one = found.setdefault(name, Moments(len(networks), [], [], []))
        one.counts.append(count)
        one.sums.append(total)
        one.products.append(product)
    return found


def _first(examples: int, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Inputs of so many examples; a loader's batches are of any size."""
    for batch in batches:
        yield batch.inputs[:examples]
        examples -= len(batch.inputs)
        if examples <= 0:
            return


def _units(
    networks: Sequence[nn.Module], places: dict[str, list[Place]], inputs: Tensor
) -> tuple[dict[tuple[str, int], Tensor], set[tuple[str, int]]]:
    """The units of all networks for one batch, (M d, samples), by group and place; and where samples are not as many
    in all of them, as tokens that are chosen by their values."""
    every: list[dict[tuple[str, int], Tensor]] = []
    for network in networks:
        seen: dict[tuple[str, int], list[Tensor]] = {}
        with ExitStack() as stack:
            stack.enter_context(evaluating(network))
            for name, some in places.items():
                for index, place in enumerate(some):
                    stack.callback(_watch(network, place, seen.setdefault((name, index), [])))
            member_logits(network, inputs.to(next(network.parameters()).device))
        every.append({key: torch.cat(parts, dim=1) for key, parts in seen.items() if parts})
    differing = {
        key for key in set().union(*every) if len({one[key].shape[1] if key in one else 0 for one in every}) > 1
    }
    alike = {key: [one[key] for one in every] for key in every[0] if key not in differing}
    return {key: _thinned(torch.cat(units)) for key, units in alike.items()}, differing


def _watch(network: nn.Module, place: Place, seen: list[Tensor]) -> Callable[[], None]:
    layer = network.get_submodule(place.layer)

    def see(value: Any) -> None:
        units = place.units(layer, value) if isinstance(value, Tensor) else None
        if units is not None:
            seen.append(units.clone())  # what comes next may work in place

    def inputs(_: nn.Module, given: tuple[Any, ...]) -> None:
        see(given[0] if given else None)

    def outputs(_: nn.Module, __: object, value: Any) -> None:
        see(value)

    if place.side == "inputs":
        return layer.register_forward_pre_hook(inputs).remove
    return layer.register_forward_hook(outputs).remove


def _thinned(units: Tensor) -> Tensor:
    step = max(1, -(-units.shape[1] // COLUMNS))
    return units[:, ::step]
