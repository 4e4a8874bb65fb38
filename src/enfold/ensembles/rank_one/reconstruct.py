"""Reconstruct: the BatchEnsemble nearest to M trained networks, layer by layer, by alternating least squares.

    min over W, s_m, r_m   Σ_m || W ∘ (Σ_j s_mj r_mj^T) - W_m ||²                                              (1)

From start="svd" it is exact where the members are a BatchEnsemble of rank one (see `representable`); "mean" reaches it
too where r and s are near 1, and not where they are random signs; "best" takes the one that is nearer after a sweep.

What is not a layer's weight: what members own in the share is copied (biases with bias="member", all of a batch norm
with batch_norm="own", its statistics with "shared"), what they share is averaged, but that biases are fitted to the s
found with "shared_pre". The averaged running variance is that of the members' activations put together, mean variance
plus variance of the means. Statistics were measured before the weights changed, so that
`enfold.train.batch_norm.reestimate` should follow in any case.

Training from such a start has been reported to fail (accuracies near chance with a large spread over seeds), so this is
a measuring instrument first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble, BatchEnsembleMembers
from enfold.ensembles.rank_one.alternating import Start, fit_layer
from enfold.ensembles.rank_one.blocks import finite_blocks, from_blocks, layer_name, member_layers
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Reconstruction:
    """The BatchEnsemble, and how near it came; printed as a table."""

    members: BatchEnsembleMembers
    residuals: dict[str, tuple[float, ...]]  # by layer: (1) after each sweep, from the start on, over Σ_m ||W_m||²
    sweeps: dict[str, int]  # by layer

    def __str__(self) -> str:
        width = max(len(layer_name(name)) for name in self.residuals)
        rows = [
            f"{layer_name(name):<{width}}  {residuals[0]:.3e}  {residuals[-1]:.3e}  {self.sweeps[name]:>6}"
            for name, residuals in self.residuals.items()
        ]
        return "\n".join([f"{'layer':<{width}}  {'start':<9}  {'residual':<9}  sweeps", *rows])


@torch.no_grad()
def reconstruct(
    members: Ensemble,
    share: BatchEnsemble | None = None,
    *,
    sweeps: int = 1000,
    tolerance: float = 1e-6,
    start: Start = "best",
) -> Reconstruction:
    """The BatchEnsemble nearest to the members, which are left untouched; float64 inside, stored as the network is.

    A layer is done when a sweep lessens its residual by less than the tolerance, relative to the residual.
    """
    _check(members, share, sweeps, tolerance, start)
    share = share or BatchEnsemble(members.num_members)
    model = share(members.member(0))
    state, residuals = members.expand(), {}
    blocks = {prefix: finite_blocks(state[f"{prefix}weight"], shape, prefix) for prefix, shape in model.layers.items()}
    for prefix, shape in model.layers.items():
        fitted, found = fit_layer(blocks[prefix], share, bool(shape.inputs), sweeps, tolerance, start)
        residuals[prefix.removesuffix(".")] = tuple(found)
        weight = model.shared.state()[f"{prefix}weight"]
        weight.copy_(from_blocks(fitted.weight, shape, weight.shape))
        fast = model.fast.state()
        fast[f"{prefix}s"].copy_(fitted.s.flatten(2))
        if shape.inputs:
            fast[f"{prefix}r"].copy_(fitted.r.flatten(2))
    _copy_rest(model, state)
    return Reconstruction(model, residuals, {name: len(found) - 1 for name, found in residuals.items()})


def _check(members: Ensemble, share: BatchEnsemble | None, sweeps: int, tolerance: float, start: str) -> None:
    member_layers(members)
    if share is not None and share.num_members != members.num_members:
        raise EnfoldError(
            f"a reconstruction has as many members as it is made of, got {members.num_members} members and "
            f"num_members={share.num_members}: let the BatchEnsemble have num_members: {members.num_members}"
        )
    if sweeps < 1:
        raise EnfoldError(f"there must be at least 1 sweep, got {sweeps}: 1000 is the default")
    if not 0 <= tolerance < 1:
        raise EnfoldError(f"the tolerance must be in [0, 1), got {tolerance}: 1e-6 is the default")
    if start not in get_args(Start):
        raise EnfoldError(f"the start must be one of {', '.join(get_args(Start))}, got {start!r}: best tries both")


def _copy_rest(model: BatchEnsembleMembers, state: State) -> None:
    """Everything but the layers' weights."""
    for name, stored in model.own.state().items():
        stored.copy_(state[name])
    weights = {f"{prefix}weight" for prefix in model.layers}
    fast = model.fast.state()
    for name, stored in model.shared.state().items():
        if name in weights:
            continue
        values = state[name].detach()
        if not values.is_floating_point():
            stored.copy_(values[0])
        elif name in model.scaled_biases:
            s = fast[f"{name.removesuffix('bias')}s"].sum(0)  # (M, out)
            size = s.square().sum(0)
            stored.copy_((s * values).sum(0) / torch.where(size > 0, size, 1.0))
        else:
            stored.copy_(values.mean(0))
            means = state.get(f"{name.removesuffix('running_var')}running_mean")
            if name.endswith("running_var") and means is not None:
                stored.add_(means.detach().var(0, correction=0))
