"""OT-Fusion: layer by layer from the input, members' units are transported to one member's at minimal cost.

    D[i, j] = ||x_i - y_j||²    x_i, y_j: incoming weights of units, after layers that are aligned already         (1a)
                                or activations on training examples                                                (1b)
    T = argmin over transport plans <T, D>  - ε H(T),   rows and columns of T sum to 1/d                           (2)
    W̃_l = (d T_l) W_l (d T_{l-1})ᵀ,   θ̄ = (1/M) Σ_m θ̃_m                                                           (3)

With ε = 0 and equal widths, d T is a permutation, and (2) is a linear assignment problem.

S. P. Singh, M. Jaggi: Model Fusion via Optimal Transport, NeurIPS 2020, arXiv:1910.05653.

Differs from the paper: groups of units are found for any network; if several layers produce one group (residual
streams), those whose inputs are aligned already are compared together; members of different widths are refused; blocks
of units (heads), and groups that no layer shows, or none on the same samples in all members, are matched by weights
before; ε is relative to the mean cost, a squared distance, where the authors' commands use the distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.merge.common.activations import Moments, Side
from enfold.merge.common.assign import best_order
from enfold.merge.common.inputs import Models, prepare_inputs, require_reference
from enfold.merge.common.merging import build_network, observe_members
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.symmetry import Axis, Group, soft
from enfold.symmetry.matching import as_real

Cost = Literal["weights", "activations"]
ROUNDS = 1000


@checked
def ot_fusion(
    models: Models,
    train: Examples,
    *,
    reference: Annotated[int, Field(ge=0)] = 0,
    cost: Cost = "activations",
    regularisation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    watch: Side = "outputs",
    examples: Annotated[int, Field(ge=1)] = 4096,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after transporting their units to one member's, layer by layer.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples on which units are compared.
        reference: Index of the member to whose units the others' are transported.
        cost: Distances of units by incoming "weights", or by "activations" on training examples.
        regularisation: Entropic regularisation ε: 0 is exact; above, a unit is transported to several.
        watch: Where activations are observed: as "outputs" of their layers, or as "inputs" of the next.
        examples: Maximum number of training examples.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples and of matching.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("ot_fusion", models, train, needs_train=True, unpack=unpack)
    require_reference(reference, inputs.ensemble.num_members)
    if inputs.ensemble.num_members == 1:
        return inputs.ensemble.member(0).eval()
    symmetry, states, moments = observe_members(inputs, reference, watch, seed, examples)
    learned, rest = set(inputs.ensemble.skeleton.parameters), [symmetry[name] for name in moments]
    while rest:
        group = max(rest, key=lambda one: _readiness(one, rest, learned, states[reference]))
        ready, producing = _incoming(group, rest, learned)
        rest.remove(group)
        for index in set(range(len(states))) - {reference}:
            if cost == "weights":
                costs = _weight_costs(states[reference], states[index], ready or producing)  # (1a)
            else:
                costs = _activation_costs(moments[group.name], reference, index)  # (1b)
            plan = transport(costs, regularisation)  # (2)
            states[index] = soft(states[index], group, plan, plan.mT)  # (3)
    return build_network(inputs, mean_of(states), repair, seed)


def transport(costs: Tensor, regularisation: float = 0.0) -> Tensor:
    """Return d T of equation (2), (d, d), whose rows and columns sum to 1."""
    if not bool(costs.isfinite().all()):
        raise EnfoldError("costs must be finite, got NaN or infinity: remove members with NaN")
    if not regularisation:
        return torch.eye(len(costs), dtype=costs.dtype)[best_order(costs.max() - costs)]
    strength = regularisation * float(costs.mean())
    logits = -costs / (strength or 1.0)
    for _ in range(ROUNDS):
        logits = logits - logits.logsumexp(0, keepdim=True)
        rows = logits.logsumexp(1, keepdim=True)
        logits = logits - rows
        if float(rows.abs().max()) < 1e-9:
            break
    if not bool(logits.exp().isfinite().all()):
        raise EnfoldError(f"regularisation is too small for a finite plan, got {regularisation}: use 0, which is exact")
    return logits.exp()


def _incoming(group: Group, rest: Sequence[Group], learned: set[str]) -> tuple[list[Axis], list[Axis]]:
    """Return the axes that produce the units: those of tensors in which everything else is aligned, and all."""
    waiting = {axis.name for other in rest if other is not group for axis in other.axes}
    waiting |= {axis.name for axis in group.axes if axis.role == "consumes"}  # recurrent
    producing = [axis for axis in group.axes if axis.role != "consumes" and axis.name in learned]
    return [axis for axis in producing if axis.name not in waiting], producing


def _readiness(group: Group, rest: Sequence[Group], learned: set[str], state: State) -> tuple[bool, int]:
    """Return the rank of a group: first those that depend on aligned groups only; then those of which most weights are
    ready, so that a residual stream precedes groups of which only biases and scales are."""
    ready, producing = _incoming(group, rest, learned)
    return ready == producing, sum(axis.units_first(state[axis.name])[0].numel() for axis in ready)


def _weight_costs(fixed: State, state: State, axes: Sequence[Axis]) -> Tensor:
    ours, theirs = (
        torch.cat([as_real(axis.by_unit(one[axis.name]).detach().cpu()).flatten(1).double() for axis in axes], dim=1)
        for one in (fixed, state)
    )
    return torch.cdist(ours, theirs).square()


def _activation_costs(moments: Moments, reference: int, index: int) -> Tensor:
    """Return E[(x - y)²] = E[x²] + E[y²] - 2 E[x y]."""
    second = moments.second()
    ours, theirs = (moments.block(second, one, one).diagonal() for one in (reference, index))
    return (ours[:, None] + theirs - 2 * moments.block(second, reference, index)).clamp_min(0)
