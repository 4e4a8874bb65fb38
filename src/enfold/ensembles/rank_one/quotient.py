"""The Hadamard quotient of two weights and how far it is from rank one.

    W_a = W ∘ (s_a r_a^T),  W_b = W ∘ (s_b r_b^T)   =>   W_a / W_b = (s_a/s_b) (r_a/r_b)^T                    (1)
    defect = σ_2 / σ_1  of the quotient Q; with T taps, which have r and s in common,                          (2)
    defect = max(√T σ_2(Q̄), σ_1(Q - Q̄)) / max(√T σ_1(Q̄), σ_1(Q - Q̄)),   Q̄ the mean of Q over taps          (3)

(3) is (2) for one tap, and 0 exactly if the taps of each channel pair have the same quotient and these have rank one.
Where a weight of b is near zero, the quotient is undefined. If the weight of a is near zero too, the entry is left out
and filled from the other entries. If it is not, no factor explains it, and the defect is 1, unless the complete row or
column is zero in one network, where its factor may be zero. "Near zero" is relative to the row and the column, since
both may be scaled by any factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError

NEAR_ZERO = 1e-6  # relative to the typical size in row and column: quotients would be outliers
CLEARLY_MORE = 1e3  # times as large is no longer near zero; entries in between are left out
DEAD = 1e-20  # relative to the complete weight: a row or column of a dead unit


@dataclass(frozen=True)
class Quotient:
    """a / b, with finite values in place of undefined ones."""

    values: Tensor  # (groups, outputs, inputs, taps); entries that were left out are filled
    left_out: int  # entries near zero in a and b
    contradictions: int  # entries near zero only in b, which no factor explains

    def defect(self, *, balanced: bool) -> float:
        """Return (3), the maximum over groups."""
        if self.contradictions:
            return 1.0
        return _defect(_balance(self.values) if balanced else self.values)


def hadamard_rank_defect(a: Tensor, b: Tensor, *, balanced: bool = False) -> float:
    """Return how far a / b is from rank one: σ_2 / σ_1, between 0 and 1, and 0 exactly if a is b ∘ (s r^T).

    Args:
        a: A weight, (out, in) or (out, in, *taps).
        b: A weight of the same shape.
        balanced: Scale rows and columns of the quotient to a geometric mean of 1 first, which does not change the rank:
            the defect then does not depend on the scale of units. Otherwise a single row that is tiny in b, such as
            that of a dead unit, makes all others negligible.

    Raises:
        EnfoldError: If the shapes differ or are not those of weights, or a value is not finite.
    """
    for name, weight in (("a", a), ("b", b)):
        if weight.ndim < 2:
            raise EnfoldError(
                f"{name} must be a weight (out, in, *taps), got the shape {tuple(weight.shape)}: pass the weight "
                "of a linear layer or a convolution"
            )
        if not bool(weight.isfinite().all()):
            raise EnfoldError(f"{name} must be finite, got NaN or infinite values: check whether training diverged")
    if a.shape != b.shape:
        raise EnfoldError(
            f"a and b must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}: pass weights of one layer"
        )
    blocks = [weight.detach().cpu().double().reshape(1, *weight.shape[:2], -1) for weight in (a, b)]
    return quotient(*blocks).defect(balanced=balanced)


def quotient(a: Tensor, b: Tensor) -> Quotient:
    """Return a / b of two weights in blocks, (groups, outputs, inputs, taps)."""
    size_a, size_b = _relative(a), _relative(b)
    dead = size_a.isnan() | size_b.isnan()
    near_zero = ~dead & (size_b < NEAR_ZERO)
    contradictory = near_zero & (size_a >= CLEARLY_MORE * NEAR_ZERO)
    present = ~(dead | near_zero)
    values = torch.where(present, a, 0.0) / torch.where(present, b, 1.0)
    if not bool(present.all()):
        values = torch.where(present, values, _fill(values, present))
    left_out = int((~present & ~contradictory).sum())
    return Quotient(values, left_out, int(contradictory.sum()))


def _relative(weight: Tensor) -> Tensor:
    """Return the size of each entry relative to its row and column; NaN where one of them is dead."""
    squares = weight.square()
    row = squares.mean((-2, -1), keepdim=True).sqrt()  # (groups, outputs, 1, 1)
    column = squares.mean((-3, -1), keepdim=True).sqrt()  # (groups, 1, inputs, 1)
    total = squares.mean((-3, -2, -1), keepdim=True).sqrt()
    alive = (row > DEAD * total) & (column > DEAD * total)
    return torch.where(alive, weight.abs() * total / (row * column), torch.nan)


def _fill(values: Tensor, present: Tensor) -> Tensor:
    """Return s_o r_i for all (o, i), propagated from known rows to columns and back through present entries."""
    total, count = (values * present).sum(-1), present.sum(-1).double()  # (groups, outputs, inputs)
    rows, columns = count.sum(-1) == 0, count.sum(-2) == 0  # without entries: any factor fits
    s, r = rows.double(), columns.double()
    while not bool(rows.all()):
        # Start again in each group with the unknown row that has most entries; its scale is free.
        start = torch.where(rows, -1.0, count.sum(-1)).argmax(-1, keepdim=True)
        s = torch.where(rows, s, torch.zeros_like(s).scatter(-1, start, 1.0))
        rows = rows.scatter(-1, start, True)
        while True:
            r, reached = _propagate(total.mT, count.mT, s, rows, r, columns)
            s, found = _propagate(total, count, r, reached, s, rows)
            if bool((reached == columns).all()) and bool((found == rows).all()):
                break
            rows, columns = found, reached
    return (s.unsqueeze(-1) * r.unsqueeze(-2)).unsqueeze(-1)


def _propagate(
    total: Tensor, count: Tensor, known: Tensor, is_known: Tensor, factor: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the factors with least-squares values for those that can be reached now, and which have been reached."""
    known = torch.where(is_known, known, 0.0).unsqueeze(-2)
    weight = (known.square() * count).sum(-1)
    reached = ~done & (weight > 0)
    estimate = (known * total).sum(-1) / torch.where(reached, weight, 1.0)
    return torch.where(reached, estimate, factor), done | reached


def _balance(values: Tensor) -> Tensor:
    """Return values with rows and columns scaled to a geometric mean of 1 over their non-zero entries."""
    for axes in ((-2, -1), (-3, -1)):
        there = values != 0
        logs = torch.where(there, values.abs().clamp_min(torch.finfo(values.dtype).tiny).log(), 0.0)
        mean = logs.sum(axes, keepdim=True) / there.sum(axes, keepdim=True).clamp_min(1)
        values = values / mean.exp()
    return values


def _defect(values: Tensor) -> float:
    """Return (3), the maximum over groups."""
    mean = values.mean(-1)
    levels = torch.linalg.svdvals(mean) * values.shape[-1] ** 0.5  # (groups, min(outputs, inputs))
    second = levels[:, 1] if levels.shape[1] > 1 else torch.zeros_like(levels[:, 0])
    deviation = (values - mean.unsqueeze(-1)).flatten(-2)  # between taps
    between = _spectral_norm(deviation) if values.shape[-1] > 1 else torch.zeros_like(second)
    top = torch.maximum(levels[:, 0], between)
    defects = torch.maximum(second, between) / torch.where(top > 0, top, 1.0)  # (3)
    return float(defects.max())


def _spectral_norm(matrices: Tensor) -> Tensor:
    """Return σ_1 of each matrix from its smaller Gram matrix, which is much cheaper for many taps."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    largest: Tensor = torch.linalg.eigvalsh(wide @ wide.mT)[..., -1]
    return largest.clamp_min(0).sqrt()
