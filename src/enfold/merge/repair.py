"""REPAIR: hidden units of a merged network get the means and standard deviations that they had in the members.

    goal:   μ* = Σ_m α_m μ_m,   σ* = Σ_m α_m σ_m            of each unit before its non-linearity; α_m = 1/M      (1)
    layer:  x' = μ* + σ* (x - μ) / σ                        repair                                                (2a)
            x' = μ  + σ* (x - μ) / σ                        rescale                                               (2b)
    fused:  w' = w σ*/σ,   b' = (b - μ) σ*/σ + μ*  (or μ)                                                         (3)
    μ, σ:   measured in the merged network, or expected of the mean of the members' units (closed_form):
            μ = μ*,   σ² = Σ_mn α_m α_n ρ_mn σ_m σ_n        ρ_mn: correlation of the unit in two members          (4)

The mean of M units with correlation ρ has √((1 + (M-1) ρ) / M) times the standard deviation of one of them, in every
layer: activations of merged networks collapse. Batch norms compensate it once their statistics are measured again
("reset"), which is all they need. Layers are corrected one after the other, each measured with all earlier corrections
in a separate pass over the training examples that ends at the layer; the closed form needs one pass of the members, and
is exact for the first layer only.

K. Jordan, H. Sedghi, O. Saukh, R. Entezari, B. Neyshabur: REPAIR: REnormalizing Permuted Activations for Interpolation
Repair, ICLR 2023, arXiv:2211.08403.

Differs from the paper: any number of members, optionally with weights α; standard deviations are over all training
examples, not a mean over batches, and hold in the returned network; corrected are linear and convolution layers whose
units are proved to be hidden, that compute what PyTorch's do, with weights that are not tied or computed, that all
networks call, and whose correction no batch norm cancels; a layer without a bias is only rescaled, so that the network
has the same parameters; a constant unit is only shifted; layers that are called several times, or not always, are
corrected in up to ten rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.copying import copy_network
from enfold.engines.skeleton import find_places, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.merge.common.inputs import Models, first_inputs, prepare_inputs
from enfold.merge.common.layers import PRODUCERS, has_torch_forward, produced_axis, shows_outputs
from enfold.merge.common.spreads import (
    Moments,
    batches_of,
    layers_cancelled_by_norms,
    measure_layer,
    measure_networks,
)
from enfold.merge.common.states import find_units, states_of
from enfold.symmetry import Symmetry, match_state
from enfold.train.batch_norm import reestimate

RepairKind = Literal["none", "reset", "repair", "rescale", "closed_form"]
"""The correction of the statistics of a merged network."""

SILENT = 1e-6  # a standard deviation below this fraction of the goal is rounding
ROUNDS = 10  # for layers whose inputs depend on their own outputs
SETTLED = 1e-5  # a change, relative to the standard deviation, after which no other round follows


@checked
def repair(
    network: nn.Module,
    models: Models,
    train: Examples,
    *,
    kind: RepairKind = "repair",
    weights: tuple[float, ...] | None = None,
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return a copy of a merged network whose hidden units have the statistics of the members.

    Args:
        network: The merged network; it is not modified.
        models: The ensemble, or networks, that it was merged from; they are not modified. Their units are matched to
            the network's by weights first.
        train: Training examples on which statistics are measured.
        kind: "repair" sets means and standard deviations, "rescale" only standard deviations, "closed_form" estimates
            them from correlations of the members, "reset" only measures batch norms again, "none" changes nothing.
        weights: Weights α of the members in the merge, such as those of `soup_weights`; None if all are equal.
        seed: Seed of the order of the examples and of matching.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the same class in eval mode.

    Raises:
        EnfoldError: If the networks differ in architecture, or there are fewer than two training examples.
    """
    inputs = prepare_inputs("repair", models, train, needs_train=True, warn=False, unpack=unpack)
    return repair_network(copy_network(network), inputs.ensemble, inputs.data, kind, seed=seed, weights=weights).eval()


@torch.no_grad()
def repair_network(
    network: nn.Module,
    ensemble: Ensemble,
    data: Data,
    kind: RepairKind = "repair",
    *,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> nn.Module:
    """Correct a merged network in place and return it; members are matched to its units by weights first.

    Args:
        network: The network.
        ensemble: The ensemble.
        data: The data.
        kind: The kind of repair.
        seed: The seed.
        weights: The weights of the members in the mean; equal by default.
    """
    if kind == "none":
        return network
    if kind != "reset":
        with torch.random.fork_rng(devices=[]):  # a loader may draw
            example = first_inputs(data, "repair")
        symmetry = find_units(network, example, seed)
        names = layers_to_repair(network, symmetry, data, seed)
        if kind == "closed_form":  # layers that are called with different samples in each member have no correlation
            names = [name for name in names if not symmetry.depends_on_values(name)]
        if names:
            own = {name: tensor.detach() for name, tensor in read_state(network).items()}
            learned = set(ensemble.skeleton.parameters)
            states = [match_state(own, state, symmetry, seed=seed, learned=learned) for state in states_of(ensemble)]
            members = [ensemble.network(state) for state in states]
            repair_layers(network, members, data, names, kind, seed=seed, weights=weights)
    reestimate(network, data, seed=seed)
    return network


def layers_to_repair(network: nn.Module, symmetry: Symmetry, data: Data, seed: int = 0) -> list[str]:
    """Return the names of the layers to correct, without those whose correction batch norms cancel.

    Args:
        network: The network.
        symmetry: The groups of units.
        data: The data.
        seed: The seed.
    """
    names = hidden_layers(network, symmetry)
    cancelled = layers_cancelled_by_norms(network, names, data, seed)
    return [name for name in names if name not in cancelled]


def hidden_layers(network: nn.Module, symmetry: Symmetry) -> list[str]:
    """Return the names of the layers that may be corrected: all their units are hidden, and their weights untied."""
    hidden: dict[tuple[str, int], set[int]] = {}
    for group in symmetry.groups:
        for axis in group.axes:
            hidden.setdefault((axis.name, axis.axis), set()).update(range(axis.offset, axis.offset + axis.length))
    untied = {name for name, where in find_places(network)[0].items() if len(where) == 1}
    found = []
    for name, module in network.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module, PRODUCERS) and _is_scaled_by_its_weight(module) and weight in untied:
            number = produced_axis(module)
            complete = len(hidden.get((weight, number), ())) == module.weight.shape[number]
            if complete and (module.bias is None or weight.removesuffix("weight") + "bias" in untied):
                found.append(name)
    return found


def _is_scaled_by_its_weight(layer: nn.Module) -> bool:
    """Return whether equation (3) has the effect of (2)."""
    return shows_outputs(layer) and has_torch_forward(layer)


@torch.no_grad()
def repair_layers(
    network: nn.Module,
    members: Sequence[nn.Module],
    data: Data,
    names: Sequence[str],
    kind: RepairKind = "repair",
    *,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> None:
    """Correct layers in place, without those that some network does not call.

    Args:
        network: The merged network.
        members: The members, with their units in the order of the network's.
        data: Data whose training examples are used.
        names: The names of the layers.
        kind: "repair", "rescale" or "closed_form".
        seed: Seed of the order of the examples.
        weights: Weights α of equation (1); None if all are equal.
    """
    alpha = _normalise(weights, len(members))
    batches = partial(batches_of, data, next(network.parameters()).device, seed)
    closed = kind == "closed_form"
    shown = measure_networks(members, names, batches(), alpha.tolist() if closed else None)
    if shown.examples < 2:
        raise EnfoldError(
            f"repair needs 2 train examples or more to measure statistics, got {shown.examples}: pass more"
        )
    goals = {name: _mean([sums[name].moments() for sums in shown.each], alpha) for name in shown.names}  # (1)
    if closed:
        for name in [name for name in goals if name not in shown.unequal]:
            _correct(network.get_submodule(name), shown.mean[name].moments(), goals[name], kind)  # (4)
        return
    for _ in range(1 if shown.is_sequential else ROUNDS):
        moved = 0.0
        for name, goal in goals.items():
            with torch.random.fork_rng(devices=[]):  # a loader that draws yields the same in each pass
                reestimate(network, data, seed=seed)
            sums = measure_layer(network, name, batches(), once=shown.is_sequential)
            if sums.count > 1:
                moved = max(moved, _correct(network.get_submodule(name), sums.moments(), goal, kind))
        if moved < SETTLED:
            break


def _normalise(weights: Sequence[float] | None, count: int) -> Tensor:
    """Return α of equation (1), (M,)."""
    given = torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64)
    if len(given) != count or not bool((given >= 0).all()) or not 0 < float(given.sum()) < math.inf:
        raise EnfoldError(
            f"weights must be one number for each of the {count} members, 0 or more and not all 0, got "
            f"{given.tolist()}: pass those of the merge, or None if all are equal"
        )
    return given / given.sum()


def _mean(parts: Sequence[Moments], alpha: Tensor) -> Moments:
    means, spreads = (torch.stack(each) for each in zip(*parts, strict=True))
    alpha = alpha.to(means.device)
    return alpha @ means, alpha @ spreads


def _correct(layer: nn.Module, now: Moments, goal: Moments, kind: RepairKind) -> float:
    """Fuse a correction into a layer and return by how much units change, relative to their standard deviations."""
    scale, shift = _correction(*now, *goal, kind)
    _fuse(layer, scale, shift)
    mean, spread = now
    change = (scale - 1).abs() * spread + (0 if layer.bias is None else (scale * mean + shift - mean).abs())
    return float(change.max() / spread.mean()) if float(spread.mean()) else 0.0


def _correction(mean: Tensor, spread: Tensor, goal: Tensor, wanted: Tensor, kind: RepairKind) -> tuple[Tensor, Tensor]:
    """Return scale and shift of equation (2) as x' = scale x + shift."""
    moves = spread > SILENT * wanted
    scale = torch.where(moves, wanted / torch.where(moves, spread, torch.ones_like(spread)), torch.ones_like(spread))
    return scale, (mean if kind == "rescale" else goal) - scale * mean


def _fuse(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Apply equation (3) in place."""
    weight, bias = layer.get_parameter("weight"), layer.bias
    shape = [1] * weight.ndim
    shape[produced_axis(layer)] = -1
    weight.mul_(scale.to(weight).view(shape))
    if isinstance(bias, Tensor):
        bias.mul_(scale.to(bias)).add_(shift.to(bias))
