"""Narrowing: a network of the same class whose hidden layers have a fraction of their widths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import nn

from enfold.engines.copying import copy_network
from enfold.ensembles.common.surgery.cuts import (
    NARROWABLE,
    WIDTH_PRESERVING,
    cut_attributes,
    cut_layer,
    cut_tensors,
    widths_of,
)
from enfold.ensembles.common.surgery.ends import ends
from enfold.ensembles.common.surgery.layers import CONVOLUTIONS, replace_modules, require_resizable
from enfold.ensembles.common.surgery.rehearsal import Rehearsal
from enfold.errors import EnfoldError

HEADS = ("heads", "nhead", "n_head", "num_head")  # how attributes that count attention heads end
TOLERANCE = 1.25  # scaling all widths by one ratio is preferred up to this multiple of the requested fraction

Table = dict[int, int]  # new widths by the old ones


def narrow_network(network: nn.Module, fraction: float, groups: int = 1) -> nn.Module:
    """Return a network of the same class with a fraction of the hidden widths, and the same inputs and outputs.

    All widths are scaled by one ratio of integers, so that sums, concatenations and flattened axes still fit; where
    that would leave them much wider than requested, each is rounded up separately. Widths stay divisible by `groups`
    and by the number of attention heads. A grouped convolution or norm has as many of its groups as divide its new
    width. Parameters and buffers outside of layers are cut along the axis that is a hidden width. The result is run
    without data on likely input shapes; integer attributes of the network are scaled if it only runs with that.

    Args:
        network: The network, which is not modified.
        fraction: The new hidden widths as a fraction of the old ones.
        groups: A factor on the number of groups of hidden convolutions.

    Raises:
        EnfoldError: If the network cannot be narrowed.
    """
    hidden = Hidden.of(network)
    if not hidden.widths:
        return copy_network(network)
    for name in hidden.changed:
        require_resizable(hidden.layers[name], name)
    rehearsal = Rehearsal(network, [hidden.layers[name] for name in hidden.inputs if name in hidden.layers])
    failure = None
    for table, attributes in product(hidden.tables(fraction, groups), (False, True)):
        twin = hidden.cut(network, table, groups, attributes=attributes)
        found = rehearsal.failure(twin)
        if found is None:
            return twin
        failure = failure or found
    raise EnfoldError(
        f"network must run after its layers were narrowed, but with {fraction:.3g} of its hidden widths this "
        f"{type(network).__name__} {failure or 'has widths that do not follow from the others'}: let its forward "
        "take all sizes from its layers, or use a method that does not change widths"
    )


@dataclass(frozen=True)
class Hidden:
    """The hidden widths of a network, and the layers that have them."""

    inputs: tuple[str, ...]  # layers that receive the inputs of the network
    outputs: tuple[str, ...]  # layers that give its outputs
    layers: dict[str, nn.Module]  # layers that can be narrowed, in the order of registration
    given: tuple[int, ...]  # widths of outputs of layers
    taken: dict[str, int]  # widths of inputs of layers, by name
    heads: tuple[int, ...]

    @classmethod
    def of(cls, network: nn.Module) -> Hidden:
        """Return the hidden widths of a network."""
        inputs, outputs = (tuple(names) for names in ends(network, WIDTH_PRESERVING))
        layers = _layers(network)
        _require_known(network, inputs, layers, "inputs must be received by")
        _require_known(network, outputs, layers, "outputs must come from")
        given, taken = [], {}
        for name, layer in layers.items():
            inward, outward = widths_of(layer)
            keeps = isinstance(layer, WIDTH_PRESERVING)
            if name not in outputs and not keeps:
                given.append(outward)
            if inward and name not in inputs and not (keeps and name in outputs):
                taken[name] = inward
        return cls(inputs, outputs, layers, tuple(dict.fromkeys(given)), taken, _heads(network))

    @property
    def widths(self) -> list[int]:
        """The hidden widths without 1, which is broadcast and stays."""
        return sorted({*self.given, *self.taken.values()} - {1})

    @property
    def changed(self) -> list[str]:
        """The layers with a hidden width: all but norms and attention of the inputs and outputs of the network."""
        return [
            name for name, layer in self.layers.items() if name in self.taken or not isinstance(layer, WIDTH_PRESERVING)
        ]

    def tables(self, fraction: float, groups: int) -> Iterator[Table]:
        """Yield tables of new widths, the preferred one first."""
        grouped = any(isinstance(self.layers[name], CONVOLUTIONS) for name in self.taken)
        multiple = math.lcm(groups if grouped else 1, *self.heads)
        exact, ratio = scale_widths(self.widths, fraction, multiple)
        choices = [exact] if fraction >= 1 or ratio < 1 else []
        own = self._round_widths(fraction, multiple)
        if own is not None:
            choices.insert(len(choices) if ratio <= TOLERANCE * fraction else 0, own)
        yield from ({**choice, 1: 1} for choice in choices)

    def _round_widths(self, fraction: float, multiple: int) -> Table | None:
        """Return widths rounded up separately; other widths are multiples or divisors of the one before them."""
        new = {width: _ceil(width * fraction / multiple) * multiple for width in self.given}
        before = 0
        for name, layer in self.layers.items():
            width = self.taken.get(name)
            if width is not None and width > 1 and width not in new:
                if not before or (width % before and before % width) or new[before] * width % before:
                    return None
                new[width] = new[before] * width // before
            outward = widths_of(layer)[1]
            if name not in self.outputs and not isinstance(layer, WIDTH_PRESERVING):
                before = outward
        return new

    def cut(self, network: nn.Module, table: Table, groups: int, *, attributes: bool) -> nn.Module:
        """Return a copy with the widths of the table.

        Args:
            network: The network.
            table: The new width for each width of the network.
            groups: The factor on the groups of convolutions.
            attributes: Whether integer attributes that equal a width are replaced too.
        """
        new = {}
        for name in self.changed:
            layer = self.layers[name]
            inward, outward = widths_of(layer)
            inner = name in self.taken and name not in self.outputs
            inward = table[inward] if name in self.taken else inward
            outward = outward if name in self.outputs else table[outward]
            new[name] = cut_layer(name, layer, inward, outward, groups if inner else 1, table)
        twin = replace_modules(network, new)
        known = {child for name in self.layers for child in twin.get_submodule(name).modules()}
        for name, module in twin.named_modules():
            if module not in known:
                cut_tensors(name, module, table)
                if attributes:
                    cut_attributes(module, table)
        return twin


def scale_widths(widths: list[int], fraction: float, multiple: int) -> tuple[Table, float]:
    """Return all widths times the smallest ratio >= `fraction` that gives multiples of `multiple`, and the ratio."""
    unit = math.gcd(*widths)
    start = _ceil(unit * fraction)
    count = next(
        k for k in range(start, start + multiple + 1) if not any(width // unit * k % multiple for width in widths)
    )
    return {width: width // unit * count for width in widths}, count / unit


def _ceil(value: float) -> int:
    return max(1, math.ceil(value - 1e-9))


def _layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can be narrowed; the output layer of attention belongs to the attention."""
    layers: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        outer = layers.get(name.rpartition(".")[0])
        if isinstance(module, NARROWABLE) and not (name and isinstance(outer, nn.MultiheadAttention)):
            layers[name] = module
    return layers


def _require_known(network: nn.Module, names: Sequence[str], layers: Mapping[str, nn.Module], rule: str) -> None:
    modules, buffers = dict(network.named_modules()), dict(network.named_buffers())
    for name in names:
        if name not in layers and name not in buffers:
            kind = type(modules[name]).__name__ if name in modules else "a parameter that is not in a layer"
            raise EnfoldError(
                f"{rule} a layer whose width is known, got '{name}' ({kind}): put a linear layer in its place, or use "
                "a method that does not change widths"
            )


def _heads(network: nn.Module) -> tuple[int, ...]:
    """Return the numbers of attention heads, by which widths must be divisible."""
    found = {
        value
        for module in network.modules()
        for key, value in vars(module).items()
        if key.endswith(HEADS) and type(value) is int and value > 0
    }
    return tuple(sorted(found))
