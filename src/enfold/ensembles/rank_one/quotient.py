"""The Hadamard quotient of two weights and how far it is from rank one.

    W_a = W ∘ (s_a r_a^T),  W_b = W ∘ (s_b r_b^T)   =>   W_a / W_b = (s_a/s_b) (r_a/r_b)^T                    (1)
    defect = σ_2 / σ_1  of the quotient Q; with T taps, which share r and s,                                   (2)
    defect = max(√T σ_2(Q̄), σ_1(Q - Q̄)) / max(√T σ_1(Q̄), σ_1(Q - Q̄)),   Q̄ the mean of Q over taps          (3)

(3) is (2) for one tap, and 0 exactly if the taps of each channel pair have one quotient and these are of rank one. A
weight of b near zero has no quotient to speak of. If a's is near zero too, the pair says nothing there: the entry is
left out, and filled by what the others imply. If a's is not, no factor explains it, and the defect is 1; unless all of
the row or column is zero in a member, for which its own factor may be zero. Near zero is meant relative to the row and
the column, since both may be scaled by anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError

NEAR_ZERO = 1e-6  # of what is usual in the row and the column: the quotient would be made of outliers
CLEARLY_MORE = 1e3  # times as much is no longer near zero; between the two nothing is concluded
DEAD = 1e-20  # of the whole weight: a row or column of a unit that has been switched off


@dataclass(frozen=True)
class Quotient:
    """a / b, without infinities."""

    values: Tensor  # (groups, outputs, inputs, taps); what was left out is filled
    left_out: int  # entries that say nothing
    contradictions: int  # entries near zero in b alone, which no factor explains

    def defect(self, *, balanced: bool) -> float:
        """Equation (3), the worst of all groups."""
        if self.contradictions:
            return 1.0
        return _defect(_balanced(self.values) if balanced else self.values)


def hadamard_rank_defect(a: Tensor, b: Tensor, *, balanced: bool = False) -> float:
    """How far a / b is from rank one: σ_2 / σ_1, between 0 and 1, and 0 exactly if a is b ∘ (s r^T).

    a and b are (out, in) or (out, in, *taps). With `balanced`, rows and columns of the quotient are first brought to
    one size (their geometric mean), which leaves the rank as it is: then no unit counts more for being larger in one
    network, and multiplying a or b by any s r^T changes nothing. Without it a single row that is tiny in b, such as a
    dead unit's, makes all others negligible.
    """
    for name, weight in (("a", a), ("b", b)):
        if weight.ndim < 2:
            raise EnfoldError(
                f"a Hadamard quotient is of weights (out, in, *taps), but {name} has the shape {tuple(weight.shape)}: "
                "pass the weight of a linear layer or a convolution"
            )
        if not bool(weight.isfinite().all()):
            raise EnfoldError(f"weights must be finite to be compared, but {name} is not: look for a diverged member")
    if a.shape != b.shape:
        raise EnfoldError(
            f"weights must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}: compare one layer's"
        )
    blocks = [weight.detach().cpu().double().reshape(1, *weight.shape[:2], -1) for weight in (a, b)]
    return quotient(*blocks).defect(balanced=balanced)


def quotient(a: Tensor, b: Tensor) -> Quotient:
    """a / b of two weights in blocks, (groups, outputs, inputs, taps)."""
    size_a, size_b = _relative(a), _relative(b)
    dead = size_a.isnan() | size_b.isnan()
    near_zero = ~dead & (size_b < NEAR_ZERO)
    contradictory = near_zero & (size_a >= CLEARLY_MORE * NEAR_ZERO)
    present = ~(dead | near_zero)
    values = torch.where(present, a, 0.0) / torch.where(present, b, 1.0)
    if not bool(present.all()):
        values = torch.where(present, values, _implied(values, present))
    left_out = int((~present & ~contradictory).sum())
    return Quotient(values, left_out, int(contradictory.sum()))


def _relative(weight: Tensor) -> Tensor:
    """Each entry's size by what is usual in its row and column; NaN where one of them is dead."""
    squares = weight.square()
    row = squares.mean((-2, -1), keepdim=True).sqrt()  # (groups, outputs, 1, 1)
    column = squares.mean((-3, -1), keepdim=True).sqrt()  # (groups, 1, inputs, 1)
    whole = squares.mean((-3, -2, -1), keepdim=True).sqrt()
    alive = (row > DEAD * whole) & (column > DEAD * whole)
    return torch.where(alive, weight.abs() * whole / (row * column), torch.nan)


def _implied(values: Tensor, present: Tensor) -> Tensor:
    """s_o r_i for all (o, i), found by going from known rows to columns and back through what is present."""
    total, count = (values * present).sum(-1), present.sum(-1).double()  # (groups, outputs, inputs)
    rows, columns = count.sum(-1) == 0, count.sum(-2) == 0  # nothing is known of them: any factor will do
    s, r = rows.double(), columns.double()
    while not bool(rows.all()):
        # A new start in each group: the unknown row with most entries. Its size is free.
        start = torch.where(rows, -1.0, count.sum(-1)).argmax(-1, keepdim=True)
        s = torch.where(rows, s, torch.zeros_like(s).scatter(-1, start, 1.0))
        rows = rows.scatter(-1, start, True)
        while True:
            r, reached = _propagated(total.mT, count.mT, s, rows, r, columns)
            s, found = _propagated(total, count, r, reached, s, rows)
            if bool((reached == columns).all()) and bool((found == rows).all()):
                break
            rows, columns = found, reached
    return (s.unsqueeze(-1) * r.unsqueeze(-2)).unsqueeze(-1)


def _propagated(
    total: Tensor, count: Tensor, known: Tensor, is_known: Tensor, factor: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """The least-squares factor of what can be reached and was not yet; and what has been reached."""
    known = torch.where(is_known, known, 0.0).unsqueeze(-2)
    weight = (known.square() * count).sum(-1)
    reached = ~done & (weight > 0)
    estimate = (known * total).sum(-1) / torch.where(reached, weight, 1.0)
    return torch.where(reached, estimate, factor), done | reached


def _balanced(values: Tensor) -> Tensor:
    """Rows and columns scaled to a geometric mean of 1 over their entries that are not zero."""
    for axes in ((-2, -1), (-3, -1)):
        there = values != 0
        logs = torch.where(there, values.abs().clamp_min(torch.finfo(values.dtype).tiny).log(), 0.0)
        mean = logs.sum(axes, keepdim=True) / there.sum(axes, keepdim=True).clamp_min(1)
        values = values / mean.exp()
    return values


def _defect(values: Tensor) -> float:
    """Equation (3), the worst of all groups."""
    mean = values.mean(-1)
    levels = torch.linalg.svdvals(mean) * values.shape[-1] ** 0.5  # (groups, min(outputs, inputs))
    second = levels[:, 1] if levels.shape[1] > 1 else torch.zeros_like(levels[:, 0])
    deviation = (values - mean.unsqueeze(-1)).flatten(-2)  # of taps from each other
    between = _spectral_norm(deviation) if values.shape[-1] > 1 else torch.zeros_like(second)
    top = torch.maximum(levels[:, 0], between)
    defects = torch.maximum(second, between) / torch.where(top > 0, top, 1.0)  # (3)
    return float(defects.max())


def _spectral_norm(matrices: Tensor) -> Tensor:
    """σ_1 of each, by the smaller Gram matrix: exact enough for the largest, and much cheaper for many taps."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    largest: Tensor = torch.linalg.eigvalsh(wide @ wide.mT)[..., -1]
    return largest.clamp_min(0).sqrt()
