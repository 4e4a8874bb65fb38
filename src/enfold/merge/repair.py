"""REPAIR: hidden units of a merged network get the means and spreads that they had in the members.

    goal:   μ* = Σ_m α_m μ_m,   σ* = Σ_m α_m σ_m            of each unit before its non-linearity; α_m = 1/M      (1)
    layer:  x' = μ* + σ* (x - μ) / σ                        repair                                                (2a)
            x' = μ  + σ* (x - μ) / σ                        rescale                                               (2b)
    folded: w' = w σ*/σ,   b' = (b - μ) σ*/σ + μ*  (or μ)                                                         (3)
    μ, σ:   measured in the merged network, or expected of the mean of the members' units (closed_form):
            μ = μ*,   σ² = Σ_mn α_m α_n ρ_mn σ_m σ_n        ρ_mn: correlation of the unit in two members          (4)

The mean of M units with correlation ρ has the spread √((1 + (M-1) ρ) / M) of one of them, layer upon layer: merged
networks go silent. Batch norms undo it when their statistics are measured again ("reset"), which is all they need.
Layers are measured one after the other, each behind all that is right already, in a pass each over the training part
that ends at the layer; the closed form takes one pass of the members alone, and is exact behind the inputs only.

K. Jordan, H. Sedghi, O. Saukh, R. Entezari, B. Neyshabur: REPAIR: REnormalizing Permuted Activations for Interpolation
Repair, ICLR 2023, arXiv:2211.08403.

Differs from the paper: any number of members, with weights α of their own if wanted; spreads are of the whole training
part, not a mean over batches, and reached in the network as it is returned; linear and convolution layers whose units
are hidden by proof are corrected, where they compute what PyTorch's do, their weights are not tied or computed, all
networks call them, and no batch norm undoes it; one without a bias is only rescaled, so that the network keeps its
parameters; a unit that never moves is only shifted; layers that are called several times, or not always, are corrected
in up to ten rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.copying import copied
from enfold.engines.skeleton import State, places, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.merge.common.folding import Composable, require_data, require_members
from enfold.merge.common.layers import PRODUCERS, has_torch_forward, produced_axis, shows_outputs
from enfold.merge.common.spreads import Moments, batches_of, measured, seen, undone
from enfold.merge.common.states import states_of, units_of
from enfold.symmetry import Symmetry, permute, weight_matching
from enfold.train.batch_norm import reestimate

Correction = Literal["none", "reset", "repair", "rescale", "closed_form"]
SILENT = 1e-6  # a spread below this part of the goal's is rounding
ROUNDS = 10  # over layers that see what they make themselves
SETTLED = 1e-5  # a change, as a part of the spread, after which there is no other round


@dataclass(frozen=True)
class Repair(Composable):
    """A step of a route: the network before it with its hidden units' statistics set to the members'."""

    kind: Correction = "repair"  # means and spreads; rescale: spreads; closed_form: by correlations; reset: batch norm
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
        members: Ensemble,
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
    members: Ensemble,
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
        names = worth_repairing(network, symmetry, data, seed)
        if kind == "closed_form":  # what is called with other samples in each member has no correlation
            names = [name for name in names if not symmetry.decided(name)]
        if names:
            own = {name: tensor.detach() for name, tensor in read_state(network).items()}
            states = [_nearest(own, state, symmetry, members, seed) for state in states_of(members)]
            repair(network, [members.network(state) for state in states], data, names, kind, seed=seed, weights=weights)
    reestimate(network, data, seed=seed)
    return network


def _nearest(own: State, state: State, symmetry: Symmetry, members: Ensemble, seed: int) -> State:
    learned = set(members.skeleton.parameters)
    return permute(state, symmetry, weight_matching(own, state, symmetry, seed=seed, learned=learned))


def worth_repairing(network: nn.Module, symmetry: Symmetry, data: Data, seed: int = 0) -> list[str]:
    """The names of the layers that are corrected: without those of which batch norms take it out again."""
    names = repairable(network, symmetry)
    left = undone(network, names, data, seed)
    return [name for name in names if name not in left]


def repairable(network: nn.Module, symmetry: Symmetry) -> list[str]:
    """The names of the layers that may be corrected: all their units are hidden, and their weights are their own."""
    hidden: dict[tuple[str, int], set[int]] = {}
    for group in symmetry.groups:
        for axis in group.axes:
            hidden.setdefault((axis.name, axis.axis), set()).update(range(axis.offset, axis.offset + axis.length))
    alone = {name for name, where in places(network)[0].items() if len(where) == 1}
    found = []
    for name, module in network.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module, PRODUCERS) and _is_scaled_by_its_weight(module) and weight in alone:
            number = produced_axis(module)
            whole = len(hidden.get((weight, number), ())) == module.weight.shape[number]
            if whole and (module.bias is None or weight.removesuffix("weight") + "bias" in alone):
                found.append(name)
    return found


def _is_scaled_by_its_weight(layer: nn.Module) -> bool:
    """Whether equation (3) does to its units what (2) says."""
    return shows_outputs(layer) and has_torch_forward(layer)


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
    """Correct the layers of these names in place; members are plain networks with their units in the same order.

    Layers that some network does not call are left as they are.
    """
    alpha = _shares(weights, len(members))
    batches = partial(batches_of, data, next(network.parameters()).device, seed)
    closed = kind == "closed_form"
    shown = seen(members, names, batches(), alpha.tolist() if closed else None)
    if shown.examples < 2:
        raise EnfoldError(
            f"a repair measures spreads on 2 examples or more, got {shown.examples} in the training part: pass more"
        )
    goals = {name: _mean([sums[name].moments() for sums in shown.each], alpha) for name in shown.names}  # (1)
    if closed:
        for name in [name for name in goals if name not in shown.apart]:
            _correct(network.get_submodule(name), shown.mean[name].moments(), goals[name], kind)  # (4)
        return
    for _ in range(1 if shown.plain else ROUNDS):
        moved = 0.0
        for name, goal in goals.items():
            with torch.random.fork_rng(devices=[]):  # a loader that draws gives each pass the same
                reestimate(network, data, seed=seed)
            sums = measured(network, name, batches(), once=shown.plain)
            if sums.count > 1:
                moved = max(moved, _correct(network.get_submodule(name), sums.moments(), goal, kind))
        if moved < SETTLED:
            break


def _shares(weights: Sequence[float] | None, count: int) -> Tensor:
    """α of equation (1), (M,)."""
    given = torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64)
    if len(given) != count or not bool((given >= 0).all()) or not 0 < float(given.sum()) < math.inf:
        raise EnfoldError(
            f"the weights of a repair must be one for each of the {count} members, 0 or more and not all 0, got "
            f"{given.tolist()}: give those with which members were merged, or none if all are the same"
        )
    return given / given.sum()


def _mean(parts: Sequence[Moments], alpha: Tensor) -> Moments:
    means, spreads = (torch.stack(each) for each in zip(*parts, strict=True))
    alpha = alpha.to(means.device)
    return alpha @ means, alpha @ spreads


def _correct(layer: nn.Module, now: Moments, goal: Moments, kind: Correction) -> float:
    """Fold a correction into the layer; how much it moves units, as a part of their spreads in the mean."""
    scale, shift = _correction(*now, *goal, kind)
    _fold(layer, scale, shift)
    mean, spread = now
    change = (scale - 1).abs() * spread + (0 if layer.bias is None else (scale * mean + shift - mean).abs())
    return float(change.max() / spread.mean()) if float(spread.mean()) else 0.0


def _correction(mean: Tensor, spread: Tensor, goal: Tensor, wanted: Tensor, kind: Correction) -> tuple[Tensor, Tensor]:
    """x' = scale x + shift, equation (2)."""
    moves = spread > SILENT * wanted
    scale = torch.where(moves, wanted / torch.where(moves, spread, torch.ones_like(spread)), torch.ones_like(spread))
    return scale, (mean if kind == "rescale" else goal) - scale * mean


def _fold(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Equation (3), in place."""
    weight, bias = layer.get_parameter("weight"), layer.bias
    shape = [1] * weight.ndim
    shape[produced_axis(layer)] = -1
    weight.mul_(scale.to(weight).view(shape))
    if isinstance(bias, Tensor):
        bias.mul_(scale.to(bias)).add_(shift.to(bias))
