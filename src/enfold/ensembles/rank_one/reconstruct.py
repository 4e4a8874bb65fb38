"""Fit a BatchEnsemble to M trained networks, layer by layer, by alternating least squares.

    min over W, s_m, r_m   Σ_m || W ∘ (Σ_j s_mj r_mj^T) - W_m ||²                                              (1)

With start="svd" it is exact where the networks are a BatchEnsemble of rank one (see `representable`); "mean" is exact,
too, where r and s are near 1, and not where they are random signs; "best" takes the better one after one sweep.

Other tensors: what members of the BatchEnsemble own is copied (biases with bias="member", batch norms with
batch_norm="own", their statistics with "shared"), what they have in common is averaged; with bias="shared_pre" biases
are fitted to s. The common running variance is that of all activations together, the mean variance plus the variance of
the means. Statistics belong to the weights before the fit: call `ensemble.reestimate_batch_norm(data)` afterwards.

Training from such a start has been reported to fail (accuracies near chance with a large spread over seeds): it is
mainly a way to measure how near networks are to a BatchEnsemble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import as_ensemble
from enfold.ensembles.rank_one.alternating import Start, fit_layer
from enfold.ensembles.rank_one.blocks import finite_blocks, from_blocks, layer_name, member_layers
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Reconstruction:
    """A BatchEnsemble that was fitted to networks, and the residuals of the fit; printed as a table.

    Args:
        ensemble: The BatchEnsemble.
        residuals: By layer, (1) divided by Σ_m ||W_m||² at the start and after each sweep.
        sweeps: By layer, the number of sweeps.
    """

    ensemble: BatchEnsemble
    residuals: dict[str, tuple[float, ...]]
    sweeps: dict[str, int]

    def __str__(self) -> str:
        width = max(len(layer_name(name)) for name in self.residuals)
        rows = [
            f"{layer_name(name):<{width}}  {residuals[0]:.3e}  {residuals[-1]:.3e}  {self.sweeps[name]:>6}"
            for name, residuals in self.residuals.items()
        ]
        return "\n".join([f"{'layer':<{width}}  {'start':<9}  {'residual':<9}  sweeps", *rows])


def reconstruct(
    models: Ensemble | Sequence[nn.Module],
    *,
    sweeps: int = 1000,
    tolerance: float = 1e-6,
    start: Start = "best",
    **options: Any,
) -> BatchEnsemble:
    """Return the BatchEnsemble that is nearest to networks of one architecture; see `fit_batch_ensemble`.

    Args:
        models: An ensemble, or networks of one architecture.
        sweeps: The maximum number of sweeps.
        tolerance: The relative change of the residual at which sweeps end.
        start: The initial factors.
        options: Arguments of `BatchEnsemble`.
    """
    fitted = fit_batch_ensemble(models, sweeps=sweeps, tolerance=tolerance, start=start, **options)
    return fitted.ensemble


@torch.no_grad()
def fit_batch_ensemble(
    models: Ensemble | Sequence[nn.Module],
    *,
    sweeps: int = 1000,
    tolerance: float = 1e-6,
    start: Start = "best",
    **options: Any,
) -> Reconstruction:
    """Fit a BatchEnsemble to networks of one architecture, which are not modified; computed in float64.

    Args:
        models: An ensemble, or a list of networks.
        sweeps: The largest number of sweeps per layer.
        tolerance: A layer is complete when a sweep reduces its residual by less than this fraction.
        start: Where the search starts: "svd", "mean", or "best" of both after one sweep.
        **options: Options of `BatchEnsemble`.

    Returns:
        The BatchEnsemble and the residuals of its layers.
    """
    members = as_ensemble(models)
    _check(members, options, sweeps, tolerance, start)
    model = BatchEnsemble(members.member(0), members.num_members, **options)
    state, residuals = members.expand(), {}
    blocks = {prefix: finite_blocks(state[f"{prefix}weight"], shape, prefix) for prefix, shape in model.layers.items()}
    for prefix, shape in model.layers.items():
        fitted, found = fit_layer(blocks[prefix], model, bool(shape.inputs), sweeps, tolerance, start)
        residuals[prefix.removesuffix(".")] = tuple(found)
        weight = model.shared.state()[f"{prefix}weight"]
        weight.copy_(from_blocks(fitted.weight, shape, weight.shape))
        fast = model.fast.state()
        fast[f"{prefix}s"].copy_(fitted.s.flatten(2))
        if shape.inputs:
            fast[f"{prefix}r"].copy_(fitted.r.flatten(2))
    _copy_rest(model, state)
    return Reconstruction(model, residuals, {name: len(found) - 1 for name, found in residuals.items()})


def _check(members: Ensemble, options: Mapping[str, Any], sweeps: int, tolerance: float, start: str) -> None:
    member_layers(members)
    if "num_members" in options:
        raise EnfoldError(
            f"num_members is the number of networks, {members.num_members}, got num_members={options['num_members']}: "
            "leave num_members out"
        )
    if sweeps < 1:
        raise EnfoldError(f"sweeps must be at least 1, got {sweeps}: 1000 is the default")
    if not 0 <= tolerance < 1:
        raise EnfoldError(f"tolerance must be in [0, 1), got {tolerance}: 1e-6 is the default")
    if start not in get_args(Start):
        raise EnfoldError(f"start must be one of {', '.join(get_args(Start))}, got {start!r}: choose one of them")


def _copy_rest(model: BatchEnsemble, state: State) -> None:
    """Set everything but the weights of layers."""
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
