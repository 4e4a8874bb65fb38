"""REPAIR: hidden units of a merged network get the means and spreads that they had in the members.

    goal:   μ* = Σ_m α_m μ_m,   σ* = Σ_m α_m σ_m            of each unit before its non-linearity; α_m = 1/M      (1)
    layer:  x' = μ* + σ* (x - μ) / σ                        repair                                                (2a)
            x' = μ  + σ* (x - μ) / σ                        rescale                                               (2b)
    folded: w' = w σ*/σ,   b' = (b - μ) σ*/σ + μ*  (or μ)                                                         (3)

The mean of M units with correlation ρ has the spread √((1 + (M-1) ρ) / M) of one of them, layer upon layer: merged
networks go silent. Batch norms undo it when their statistics are measured again ("reset"), which is all they need.

K. Jordan, H. Sedghi, O. Saukh, R. Entezari, B. Neyshabur: REPAIR: REnormalizing Permuted Activations for Interpolation
Repair, ICLR 2023, arXiv:2211.08403.

Differs from the paper: any number of members, with weights α of their own if wanted; spreads are of the whole training
part, not a mean over batches; while a layer is measured, those before it are corrected by what the members do with the
same batch; linear and convolution layers whose units are hidden by proof are corrected, where their weights are not
tied or computed; one without a bias is only rescaled, so that the network keeps its parameters; a unit that never moves
is only shifted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.folding import Composable, require_data, require_members
from enfold.members import Members, State
from enfold.members.skeleton import copied, places, read_state
from enfold.merging.layers import PRODUCERS, channel_axis, produced_axis, shows_outputs
from enfold.merging.states import states_of, units_of
from enfold.modes import evaluating
from enfold.symmetry import Symmetry, permute, weight_matching
from enfold.train.batch_norm import reestimate

Correction = Literal["none", "reset", "repair", "rescale"]
SILENT = 1e-6  # a spread below this part of the goal's is rounding
BATCH = 256
Sums = list[Tensor]  # how many numbers, their sums by unit, and those of their squares
Goal = tuple[Tensor, Tensor]  # means and spreads


@dataclass(frozen=True)
class Repair(Composable):
    """A step of a route: the network before it with its hidden units' statistics set to the members'."""

    kind: Correction = "repair"  # repair: means and spreads, rescale: spreads alone, reset: batch norm alone
    seed: int = 0  # of the order of the data and of matching
    weights: tuple[float, ...] | None = None  # α of equation (1), as they were merged, in any unit; None: all the same

    def __call__(self, *_: object, **__: object) -> nn.Module:
        """Refused: there is nothing to repair in members."""
        raise EnfoldError(
            "a route must begin with a fold, got Repair, which needs a network before it: write WeightMatching() >> "
            "Repair(), or give it one as Repair().after(network, members, data)"
        )

    def after(
        self,
        network: nn.Module,
        members: Members,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """A corrected copy; members are matched to the network first, unit by unit."""
        require_data(data, "repair")
        return corrected(copied(network), members, data, self.kind, seed=self.seed, weights=self.weights).eval()


@torch.no_grad()
def corrected(
    network: nn.Module,
    members: Members,
    data: Data,
    kind: Correction = "repair",
    *,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> nn.Module:
    """The network, corrected in place; members' units are put in the orders that are nearest to the network's."""
    if kind == "none":
        return network
    if kind != "reset":
        members = require_members(members, "repair")
        symmetry = units_of(network, data, seed)
        names = repairable(network, symmetry)
        if names:
            own = {name: tensor.detach() for name, tensor in read_state(network).items()}
            states = [_nearest(own, state, symmetry, members, seed) for state in states_of(members)]
            repair(network, [members.network(state) for state in states], data, names, kind, seed=seed, weights=weights)
    reestimate(network, data, seed=seed)
    return network


def _nearest(own: State, state: State, symmetry: Symmetry, members: Members, seed: int) -> State:
    learned = set(members.skeleton.parameters)
    return permute(state, symmetry, weight_matching(own, state, symmetry, seed=seed, learned=learned))


def repairable(network: nn.Module, symmetry: Symmetry) -> list[str]:
    """The names of the layers that are corrected: all their units are hidden, and their weights are their own."""
    hidden: dict[tuple[str, int], set[int]] = {}
    for group in symmetry.groups:
        for axis in group.axes:
            hidden.setdefault((axis.name, axis.axis), set()).update(range(axis.offset, axis.offset + axis.length))
    alone = {name for name, where in places(network)[0].items() if len(where) == 1}
    found = []
    for name, module in network.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module, PRODUCERS) and shows_outputs(module) and weight in alone:
            number = produced_axis(module)
            whole = len(hidden.get((weight, number), ())) == module.weight.shape[number]
            if whole and (module.bias is None or weight.removesuffix("weight") + "bias" in alone):
                found.append(name)
    return found


@torch.no_grad()
def repair(
    network: nn.Module,
    members: Sequence[nn.Module],
    data: Data,
    names: Sequence[str],
    kind: Correction = "repair",
    *,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> None:
    """Correct the layers of these names in place; members are plain networks with their units in the same order."""
    alpha = _shares(weights, len(members))
    device = next(network.parameters()).device
    with ExitStack() as stack:
        seen = [stack.enter_context(_watched(member, names)) for member in members]
        own = stack.enter_context(_watched(network, names))
        stack.enter_context(_normalising(network))
        for inputs in _pooled(Order(BATCH, seed=seed).batches(data, epoch=0), device):
            for watch in seen:
                watch.run(inputs)
            own.run(inputs, partial(_goals, [watch.calls for watch in seen], alpha), kind)
    if names and not any(watch.sums for watch in seen):
        raise EnfoldError(
            "a repair measures spreads on batches of at least 2 examples, got none in the training part: pass more"
        )
    for name, sums in own.sums.items():
        goal = _mean([_moments(watch.sums[name]) for watch in seen], alpha)  # (1)
        _fold(network.get_submodule(name), *_correction(*_moments(sums), *goal, kind))


def _shares(weights: Sequence[float] | None, count: int) -> Tensor:
    """α of equation (1), (M,)."""
    given = torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64)
    if len(given) != count or not bool((given >= 0).all()) or not 0 < float(given.sum()) < math.inf:
        raise EnfoldError(
            f"the weights of a repair must be one for each of the {count} members, 0 or more and not all 0, got "
            f"{given.tolist()}: give those with which members were merged, or none if all are the same"
        )
    return given / given.sum()


def _mean(parts: Sequence[tuple[Tensor, Tensor]], alpha: Tensor) -> tuple[Tensor, Tensor]:
    means, spreads = (torch.stack(each) for each in zip(*parts, strict=True))
    alpha = alpha.to(means.device)
    return alpha @ means, alpha @ spreads


def _correction(mean: Tensor, spread: Tensor, goal: Tensor, wanted: Tensor, kind: Correction) -> tuple[Tensor, Tensor]:
    """x' = scale x + shift, equation (2)."""
    moves = spread > SILENT * wanted
    scale = torch.where(moves, wanted / torch.where(moves, spread, torch.ones_like(spread)), torch.ones_like(spread))
    return scale, (goal if kind == "repair" else mean) - scale * mean


def _fold(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Equation (3), in place."""
    weight, bias = layer.get_parameter("weight"), layer.bias
    shape = [1] * weight.ndim
    shape[produced_axis(layer)] = -1
    weight.mul_(scale.to(weight).view(shape))
    if isinstance(bias, Tensor):
        bias.mul_(scale.to(bias)).add_(shift.to(bias))


class _Watch:
    """Sums of each unit of one network's layers before anything is done to it: those of a pass by call, and of all."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.sums: dict[str, Sums] = {}
        self.calls: dict[str, list[Sums]] = {}
        self.goals: Callable[[str, int], Goal] | None = None
        self.kind: Correction = "repair"

    def run(self, inputs: Tensor, goals: Callable[[str, int], Goal] | None = None, kind: Correction = "repair") -> None:
        """One batch; with goals for each call of a layer, what goes on from it is corrected, so that the next layers
        are measured behind layers that are right."""
        self.calls, self.goals, self.kind = {}, goals, kind
        member_logits(self.network, inputs)

    def see(self, name: str, layer: nn.Module, output: Tensor) -> Tensor:
        axis = channel_axis(layer, output)
        units = output.movedim(axis, 0).flatten(1).double()  # (units, everything else)
        part = [torch.tensor(float(units.shape[1])), units.sum(1), units.square().sum(1)]
        self.sums[name] = [a + b for a, b in zip(self.sums[name], part, strict=True)] if name in self.sums else part
        calls = self.calls.setdefault(name, [])
        calls.append(part)
        if self.goals is None:
            return output
        scale, shift = _correction(*_moments(part), *self.goals(name, len(calls) - 1), self.kind)
        shape = [1] * output.ndim
        shape[axis] = -1
        without = layer.bias is None  # its mean cannot be moved later
        return output * scale.to(output).view(shape) + (0 if without else shift.to(output).view(shape))


def _goals(seen: Sequence[Mapping[str, Sequence[Sums]]], alpha: Tensor, name: str, call: int) -> Goal:
    """Equation (1) for one call of a layer with one batch: a network that is as its members are is not changed."""
    return _mean([_moments(calls[name][min(call, len(calls[name]) - 1)]) for calls in seen], alpha)


@contextmanager
def _watched(network: nn.Module, names: Sequence[str]) -> Iterator[_Watch]:
    watch = _Watch(network)

    def hook(name: str) -> Callable[[nn.Module, object, Tensor], Tensor]:
        return lambda layer, _, output: watch.see(name, layer, output)

    with ExitStack() as stack:
        stack.enter_context(evaluating(network))
        for name in names:
            stack.callback(network.get_submodule(name).register_forward_hook(hook(name)).remove)
        yield watch


def _pooled(batches: Iterable[Batch], device: torch.device) -> Iterator[Tensor]:
    """Inputs of at least BATCH examples where their shapes allow, since the spread of few is not that of many."""
    held: list[Tensor] = []
    for batch in batches:
        if held and held[0].shape[1:] != batch.inputs.shape[1:]:
            yield from _several(held)
            held = []
        held.append(batch.inputs.to(device))
        if sum(map(len, held)) >= BATCH:
            yield torch.cat(held)
            held = []
    yield from _several(held)


def _several(held: Sequence[Tensor]) -> Iterator[Tensor]:
    if sum(map(len, held)) > 1:  # there is no spread in one example
        yield torch.cat(list(held))


@contextmanager
def _normalising(network: nn.Module) -> Iterator[None]:
    """Batch norms use each batch's own statistics and keep what they hold."""
    held = {name: buffer.clone() for name, buffer in network.named_buffers()}
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.training = True
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(held[name])


def _moments(sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    count, total, squares = sums
    mean = total / count
    return mean, (squares / count - mean.square()).clamp_min(0).sqrt()
