"""Alternating least squares for one layer: a common weight, and factors of outputs and inputs for every member.

    min over W, s_m, r_m   Σ_m || W ∘ (Σ_j s_mj r_mj^T) - W_m ||²                                              (1)

    W     = Σ_m W_m ∘ R_m / Σ_m R_m ∘ R_m,                       R_m = Σ_j s_mj r_mj^T                         (2)
    r_mi  = Σ_o W_oi s_mo W_m,oi / Σ_o (W_oi s_mo)²              (rank 1; otherwise a system of rank equations)  (3)
    s_mo  = Σ_i W_oi r_mi W_m,oi / Σ_i (W_oi r_mi)²                                                            (4)

    start:  mean  W = (1/M) Σ_m W_m,  r = s = 1                                                                (5)
            svd   W = W_1,  s_m and r_m from the leading singular vectors of W_m / W_1                         (6)
            best  the one with the lower residual after its first sweep

Taps of a convolution are further terms of the sums. Each update adds ε times the squared change of its variable, so
that (1) never increases and no denominator is zero. After each update of r and s their free scales are fixed:
max |s_m| = 1, and r_mi has a mean square of 1 over members. For networks far from a BatchEnsemble no finite factors may
attain the minimum; the residual then continues to decrease slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.rank_one.quotient import quotient
from enfold.seeds import generator

Start = Literal["best", "mean", "svd"]
EPSILON = 1e-12  # of the mean denominator


@dataclass(frozen=True)
class Factors:
    """W, r and s of one layer."""

    weight: Tensor  # (groups, outputs, inputs, taps)
    r: Tensor  # (rank, M, groups, inputs)
    s: Tensor  # (rank, M, groups, outputs)

    def scales(self) -> Tensor:
        """Return R_m, (M, groups, outputs, inputs, 1)."""
        return torch.einsum("jmgo,jmgi->mgoi", self.s, self.r).unsqueeze(-1)

    def residual(self, target: Tensor) -> float:
        """Return (1) divided by Σ_m ||W_m||²; 0 if all weights are 0."""
        total = float(target.square().sum())
        return float((self.weight * self.scales() - target).square().sum()) / total if total else 0.0


def fit_layer(
    target: Tensor, ensemble: BatchEnsemble, with_r: bool, sweeps: int, tolerance: float, start: Start
) -> tuple[Factors, list[float]]:
    """Return the factors of one layer, and the residuals at the start and after each sweep.

    Args:
        target: The members' weights, (M, groups, outputs, inputs, taps).
        ensemble: The ensemble.
        with_r: Whether the layer has factors of its inputs.
        sweeps: The maximum number of sweeps.
        tolerance: The relative change of the residual at which sweeps end.
        start: The initial factors.
    """
    now = _start(target, ensemble, with_r, start)
    found = [now.residual(target)]
    for _ in range(sweeps):
        after = _sweep(target, now, with_r)
        residual = after.residual(target)
        if not residual < found[-1]:  # the precision of float64 is reached
            break
        now = after
        found.append(residual)
        if found[-2] - residual <= tolerance * found[-2]:
            break
    return now, found


def _start(target: Tensor, ensemble: BatchEnsemble, with_r: bool, start: Start) -> Factors:
    if start == "mean":
        return _start_mean(target, ensemble)
    if start == "svd":
        return _start_svd(target, ensemble, with_r)
    both = (_start_mean(target, ensemble), _start_svd(target, ensemble, with_r))
    return min(both, key=lambda one: min(one.residual(target), _sweep(target, one, with_r).residual(target)))


def _start_mean(target: Tensor, ensemble: BatchEnsemble) -> Factors:
    """Return (5); for further ranks s is random and r zero, so that R = 1 and the first update can use them."""
    members, groups, outputs, inputs, _ = target.shape
    r, s = (
        target.new_zeros(ensemble.rank, members, groups, inputs),
        target.new_ones(ensemble.rank, members, groups, outputs),
    )
    r[0] = 1
    if ensemble.rank > 1:
        source = generator(ensemble.seed, "reconstruct")
        s[1:] = torch.randn(s[1:].shape, generator=source, dtype=s.dtype)
    return Factors(target.mean(0), r, s)


def _start_svd(target: Tensor, ensemble: BatchEnsemble, with_r: bool) -> Factors:
    """Return (6), from quotients whose entries near zero in member 0 are filled from the other entries."""
    plain = _start_mean(target, ensemble)
    r, s = plain.r.clone(), plain.s.clone()
    for index, weight in enumerate(target):
        means = quotient(weight, target[0]).values.mean(-1)  # (groups, outputs, inputs)
        if not with_r:
            s[0, index] = means[..., 0]
            continue
        left, values, right = torch.linalg.svd(means, full_matrices=False)
        for rank in range(min(ensemble.rank, values.shape[-1])):
            s[rank, index] = left[..., rank]
            r[rank, index] = right[..., rank, :] * values[..., rank, None]
    return _normalize(Factors(target[0], r, s), with_r)


def _sweep(target: Tensor, now: Factors, with_r: bool) -> Factors:
    """Return the factors after updates by (3), (4) and (2)."""
    cross = (now.weight * target).sum(-1)  # Σ over taps, (M, groups, outputs, inputs)
    square = now.weight.square().sum(-1)  # (groups, outputs, inputs)
    r = _update(now.r, now.s, cross, square) if with_r else now.r  # (3)
    s = _update(now.s, r, cross.mT, square.mT)  # (4)
    now = _normalize(Factors(now.weight, r, s), with_r)
    scales = now.scales()
    total, weight = (target * scales).sum(0), scales.square().sum(0)
    epsilon = EPSILON * weight.mean() + torch.finfo(weight.dtype).tiny
    return Factors((total + epsilon * now.weight) / (weight + epsilon), now.r, now.s)  # (2)


def _update(old: Tensor, other: Tensor, cross: Tensor, square: Tensor) -> Tensor:
    """Return the least-squares factor, (rank, M, groups, a), given the other one, (rank, M, groups, b)."""
    right = torch.einsum("jmgb,mgba->mgaj", other, cross)
    left = torch.einsum("jlmgb,gba->mgajl", other.unsqueeze(1) * other, square)
    epsilon = EPSILON * left.diagonal(dim1=-2, dim2=-1).mean() + torch.finfo(left.dtype).tiny
    right = right + epsilon * old.permute(1, 2, 3, 0)
    if len(old) == 1:
        solved = right / (left[..., 0] + epsilon)
    else:
        system = left + epsilon * torch.eye(len(old), dtype=left.dtype)
        solved = torch.cholesky_solve(right.unsqueeze(-1), torch.linalg.cholesky(system)).squeeze(-1)
    return solved.permute(3, 0, 1, 2)


def _normalize(factors: Factors, with_r: bool) -> Factors:
    """Return equivalent factors with the common scale of each channel moved into W, and max |s_m| = 1.

    Without this step scales differ between channels by orders of magnitude, and convergence stalls.
    """
    weight, r, s = factors.weight, factors.r, factors.s
    rows = _size(s.square().mean((0, 1)).sqrt())  # (groups, outputs)
    weight, s = weight * rows[..., None, None], s / rows
    if with_r:  # else there is no r that could be scaled inversely
        largest = _size(s.abs().amax(-1, keepdim=True))
        s, r = s / largest, r * largest
        columns = _size(r.square().mean((0, 1)).sqrt())  # (groups, inputs)
        weight, r = weight * columns[..., None, :, None], r / columns
    return Factors(weight, r, s)


def _size(found: Tensor) -> Tensor:
    return torch.where(found > 0, found, 1.0)
