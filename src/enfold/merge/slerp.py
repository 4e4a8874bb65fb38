"""SLERP: members are averaged on a sphere, so that the mean of each layer is as long as the members are.

    u_m = v_m / |v_m|,   v_m = θ_m - c  for each parameter tensor, around a centre c                              (1)
    u = (sin((1 - t) Ω) u_1 + sin(t Ω) u_2) / sin Ω,   Ω = arccos <u_1, u_2>,   of two members                    (2)
    u = argmin over the sphere of Σ_m angle(u, u_m)²,   of more (Karcher mean): repeat                            (3)
        g = (1/M) Σ_m log_u(u_m),   u <- cos|g| u + sin|g| g/|g|,   log_u(w) = ω (w - cos ω u)/sin ω
    θ = c + r u,   r = (1 - t) |v_1| + t |v_2|, or the mean of |v_m|                                              (4)

K. Shoemake: Animating rotation with quaternion curves, SIGGRAPH 1985; H. Karcher: Riemannian center of mass and
mollifier smoothing, Communications on Pure and Applied Mathematics 1977. Merging language models by (2) is common
practice without a paper; the spherical mean (3) of networks fine-tuned from one is an application of both.

The centre is the origin, as in practice, or the base. (3) of two members is (2) at t = 0.5.

Differs from the paper: lengths are interpolated apart from directions; tensors that are 0 in a member, equal in all, or
opposite to each other, have no direction between them and are averaged.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.errors import EnfoldError
from enfold.merge.common.fine_tuned import Base, base_state, finish
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import RepairKind

SMALL = 1e-12  # relative length below which a vector has no direction
SETTLED = 1e-10  # length of g in equation (3), in radians, at which it has converged


@checked
@torch.no_grad()
def slerp(
    models: Models,
    train: Examples | None = None,
    *,
    t: Annotated[float, Field(ge=0, le=1)] = 0.5,
    base: Base | None = None,
    iterations: Annotated[int, Field(ge=1)] = 100,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members on a sphere, layer by layer.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        t: Position between two members: 0 is the first, 1 the second; more members have equal weights.
        base: Centre of the sphere: a network, its state dict, or the file of one; None for the origin.
        iterations: Maximum number of iterations of equation (3).
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, `t` is given for other than two members,
            or examples are needed and missing.
    """
    inputs = prepare_inputs("slerp", models, train, repair=repair, unpack=unpack)
    centre = None if base is None else base_state(inputs.ensemble, base, "slerp")
    states = states_of(inputs.ensemble)
    if t != 0.5 and len(states) != 2:
        raise EnfoldError(
            f"t must be 0.5 for other than 2 members, got {t} for {len(states)}: leave it out, or pass two members"
        )
    weights = [1 - t, t] if len(states) == 2 else [1 / len(states)] * len(states)
    state = mean_of(states, weights)
    for name in inputs.ensemble.skeleton.parameters:
        if state[name].is_floating_point():
            each = torch.stack([own[name] for own in states]).double()
            middle = torch.zeros_like(each[0]) if centre is None else centre[name].double()
            found = spherical_mean((each - middle).flatten(1), weights, iterations)
            state[name] = (middle + found.view_as(middle)).to(state[name])
    return finish(inputs, state, repair, seed)


def spherical_mean(vectors: Tensor, weights: list[float], iterations: int = 100) -> Tensor:
    """Return equations (1) to (4) of one layer, (M, P) -> (P,).

    Args:
        vectors: The vectors from the centre.
        weights: Weights of the members, which sum to 1.
        iterations: Maximum number of iterations of equation (3).
    """
    factors = torch.tensor(weights, dtype=vectors.dtype, device=vectors.device)
    norms, linear = vectors.norm(dim=1), factors @ vectors
    if 1.0 in weights:
        return vectors[weights.index(1.0)]
    if bool((norms <= SMALL * norms.max()).any()) or bool((vectors == vectors[:1]).all()):
        return linear
    units = vectors / norms[:, None]  # (1)
    start = factors @ units
    if float(start.norm()) < 1e-6:  # opposite to each other
        return linear
    mean = start / start.norm()
    for _ in range(iterations):
        step = factors @ _logarithms(mean, units)
        angle = step.norm()
        if float(angle) < SETTLED:
            break
        mean = angle.cos() * mean + angle.sin() * step / angle  # (3), and (2) for two members
        mean = mean / mean.norm()
    found: Tensor = (factors @ norms) * mean  # (4)
    return found


def _logarithms(mean: Tensor, units: Tensor) -> Tensor:
    """Return the vectors at a point of the sphere that lead to others, (M, P)."""
    cos = (units @ mean).clamp(-1, 1)
    rest = units - cos[:, None] * mean
    sin = rest.norm(dim=1)
    angle = torch.atan2(sin, cos)
    return rest * torch.where(sin > SMALL, angle / sin.clamp(min=SMALL), torch.ones_like(sin))[:, None]
