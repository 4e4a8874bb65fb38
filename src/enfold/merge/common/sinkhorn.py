"""Sinkhorn iterations: batches of doubly stochastic matrices from scores, with two vectors per matrix.

    P = exp(L - f 1ᵀ - 1 gᵀ),   L = C / τ                                                     (1)
    f_i = log Σ_j exp(L_ij - g_j)   (rows),   then   g_j = log Σ_i exp(L_ij - f_i)   (columns)  (2)

Equation (2) is one iteration; columns are last, so they sum to 1 exactly, and rows sum to 1 in the limit. For f and g
near the current ones, K = exp(L - f - g) reduces iterations to vectors, a = 1 / K b and b = 1 / Kᵀ a, which represent
f - log a and g - log b. If these exceed their range, one iteration in the log domain gives another f and g.

Gradients use the same vectors. *Unrolled* gradients are those of the iterations, from last to first; *implicit*
gradients are those of the limit, which does not depend on the start:

    ∂L = Q - P ∘ (x 1ᵀ + 1 yᵀ),   Q = P ∘ ∂P,   [diag(P1)  P; Pᵀ  diag(Pᵀ1)] [x; y] = [Q1; Qᵀ1]  (3)

G. Mena, D. Belanger, S. Linderman, J. Snoek: Learning Latent Permutations with Gumbel-Sinkhorn Networks, ICLR 2018,
arXiv:1802.08665. M. Eisenberger, A. Toker, L. Leal-Taixé, F. Bernard, D. Cremers: A Unified Framework for Implicit
Sinkhorn Differentiation, CVPR 2022, arXiv:2205.06688.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from enfold.errors import EnfoldError

Gradient = Literal["unrolled", "implicit"]
ROUNDING = 8  # error of a row's sum, in units in the last place
SMALL = 1e-12  # float32 ends at 1e38, which products of two scalings, summed over iterations, must not exceed


def sinkhorn(
    scores: Tensor,
    iterations: int = 100,
    tolerance: float = 0.0,
    *,
    gradient: Gradient = "unrolled",
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return doubly stochastic matrices, (..., d, d), and the g of equation (1), (..., d), for a warm start.

    Iterations end when all rows sum to 1 within the tolerance, or within rounding if that is larger. With `start`, few
    iterations remain: their unrolled gradient approximates that of the limit, which the implicit gradient is.

    Args:
        scores: The scores, (..., d, d).
        iterations: The maximum number of iterations.
        tolerance: The maximum deviation of the row sums from 1 at which iterations end, if it exceeds rounding.
        gradient: The gradient: "unrolled" through all iterations, or the "implicit" gradient of the limit.
        start: The g of an earlier result to start from; it receives no gradient.
    """
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2]:
        raise EnfoldError(
            f"scores must be square matrices, (..., d, d), got {tuple(scores.shape)}: pass one row per unit"
        )
    if iterations < 1 or not tolerance >= 0:
        raise EnfoldError(
            f"there must be 1 iteration or more and a tolerance of 0 or more, got {iterations} and {tolerance}: 100 "
            "iterations without a tolerance are usual"
        )
    if gradient not in get_args(Gradient):
        raise EnfoldError(f"the gradient must be one of {', '.join(get_args(Gradient))}, got {gradient!r}: choose one")
    size = scores.shape[-1]
    flat = scores.reshape(-1, size, size)
    begin = flat.new_zeros(flat.shape[:2]) if start is None else start.detach().reshape(-1, size)
    matrices, columns = _Balance.apply(flat, begin, iterations, tolerance, gradient)  # type: ignore[no-untyped-call]
    return matrices.view(scores.shape), columns.view(scores.shape[:-1])


@dataclass
class _Segment:
    """Iterations that work on one K = exp(L - f - g): a_k = 1 / K b_(k-1), b_k = 1 / Kᵀ a_k."""

    f: Tensor  # (n, d)
    g: Tensor
    kernel: Tensor  # (n, d, d)
    g_in: Tensor | None  # g before the iteration in the log domain that gave f and g; None without one
    a: list[Tensor] = field(default_factory=list)  # of each iteration, (n, d)
    b: list[Tensor] = field(default_factory=list)  # one more: 1 before the first

    @classmethod
    def start(cls, scores: Tensor, g_in: Tensor) -> _Segment:
        """Return a segment before its first iteration; rows are scaled by their maxima, with one exp in total."""
        moved = scores - g_in.unsqueeze(-2)
        f = moved.amax(-1)
        return cls(f, g_in, moved.sub_(f.unsqueeze(-1)).exp_(), None, [], [torch.ones_like(f)])

    @classmethod
    def in_logs(cls, scores: Tensor, g_in: Tensor) -> _Segment:
        """Run one iteration in the log domain."""
        f = torch.logsumexp(scores - g_in.unsqueeze(-2), -1)  # (2), rows
        g = torch.logsumexp(scores - f.unsqueeze(-1), -2)  # (2), columns
        kernel = torch.exp(scores - f.unsqueeze(-1) - g.unsqueeze(-2))
        return cls(f, g, kernel, g_in, [], [torch.ones_like(f)])

    @property
    def columns(self) -> Tensor:
        """The current g."""
        return self.g - self.b[-1].log()

    def matrices(self) -> Tensor:
        """Return the matrices of equation (1)."""
        if not self.a:
            return self.kernel
        return (self.kernel * self.a[-1].unsqueeze(-1)).mul_(self.b[-1].unsqueeze(-2))


def _by_rows(kernel: Tensor, vector: Tensor) -> Tensor:
    """Return K v, computed as a row times Kᵀ, which is ten times faster on a CPU than K times a column."""
    return torch.bmm(vector.unsqueeze(1), kernel.mT).squeeze(1)


def _by_columns(kernel: Tensor, vector: Tensor) -> Tensor:
    """Return Kᵀ v."""
    return torch.bmm(vector.unsqueeze(1), kernel).squeeze(1)


def _iterate(scores: Tensor, begin: Tensor, iterations: int, tolerance: float) -> list[_Segment]:
    """Run all iterations, in as few segments as their range allows."""
    segments = [_Segment.start(scores, begin)]
    done = 0
    if tolerance:
        tolerance = max(tolerance, ROUNDING * torch.finfo(scores.dtype).eps)
    while True:
        now = segments[-1]
        sums = _by_rows(now.kernel, now.b[-1])
        if done >= iterations or (tolerance and done and _row_error(now, sums) < tolerance):
            return segments
        a = sums.reciprocal()
        columns = _by_columns(now.kernel, a)
        if float(sums.min()) > SMALL and float(columns.min()) > SMALL:  # so neither a nor b is large
            now.a.append(a)
            now.b.append(columns.reciprocal())
        else:
            segments.append(_Segment.in_logs(scores, now.columns))
        done += 1


def _row_error(segment: _Segment, sums: Tensor) -> float:
    return float(((sums * segment.a[-1] if segment.a else sums) - 1).abs().max())


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, begin: Tensor, iterations: int, tolerance: float, gradient: Gradient
    ) -> tuple[Tensor, Tensor]:
        segments = _iterate(scores, begin, iterations, tolerance)
        matrices, columns = segments[-1].matrices(), segments[-1].columns
        ctx.unrolled = gradient == "unrolled"
        ctx.segments = segments if ctx.unrolled and ctx.needs_input_grad[0] else []
        ctx.save_for_backward(scores, matrices)
        ctx.mark_non_differentiable(columns)
        return matrices, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, matrices = ctx.saved_tensors
        q = matrices * grads[0]
        with torch.no_grad():
            found = _swept(ctx.segments, scores, q) if ctx.unrolled else _limit(matrices, q)
        return found, None, None, None, None


def _swept(segments: list[_Segment], scores: Tensor, q: Tensor) -> Tensor:
    """Return the gradient of all iterations, from the last to the first; those of f and g are vectors."""
    found = q
    df, dg = -q.sum(-1), -q.sum(-2)
    least = torch.finfo(q.dtype).eps * max(float(df.abs().max()), float(dg.abs().max()))
    for segment in reversed(segments):
        left: list[Tensor] = []  # the gradient of the matrix is K ∘ Σ left rightᵀ
        right: list[Tensor] = []
        for k in range(len(segment.a) - 1, -1, -1):
            if len(left) > 1 and float(dg.abs().max()) <= least:
                break
            a, b = segment.a[k], segment.b[k + 1]
            left.append(a)
            right.append(b * dg)
            df = df - a * _by_rows(segment.kernel, right[-1])
            left.append(a * df)
            right.append(segment.b[k])
            dg = -right[-1] * _by_columns(segment.kernel, left[-1])
            df = torch.zeros_like(df)
        if left:
            found.addcmul_(segment.kernel, torch.bmm(torch.stack(left, -1), torch.stack(right, 1)))
        if segment.g_in is not None:
            df = df - _by_rows(segment.kernel, dg)
            rows = torch.exp(scores - segment.f.unsqueeze(-1) - segment.g_in.unsqueeze(-2)) * df.unsqueeze(-1)
            found += rows + segment.kernel * dg.unsqueeze(-2)
            df, dg = torch.zeros_like(df), -rows.sum(-2)
    return found


def _limit(matrices: Tensor, q: Tensor) -> Tensor:
    """Solve equation (3), with x eliminated: (diag(Pᵀ1) - Pᵀ diag(1/P1) P) y = Qᵀ1 - Pᵀ (Q1 / P1)."""
    rows, columns = matrices.sum(-1), matrices.sum(-2)
    own = q.sum(-1)
    right = q.sum(-2) - _by_columns(matrices, own / rows)

    def product(y: Tensor) -> Tensor:
        return columns * y - _by_columns(matrices, _by_rows(matrices, y) / rows)

    y = _conjugate_gradients(product, right)
    x = (own - _by_rows(matrices, y)) / rows
    return q - matrices * (x.unsqueeze(-1) + y.unsqueeze(-2))


def _conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """Solve semi-definite systems, (n, d); constants, which the matrices map to 0, change no gradient."""
    precision = torch.finfo(right.dtype).eps ** 0.75
    y, rest = torch.zeros_like(right), right
    direction, size = rest, (rest * rest).sum(-1, keepdim=True)
    goal = precision**2 * size
    for _ in range(4 * right.shape[-1]):
        if bool((size <= goal).all()):
            break
        image = product(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        step = torch.where((curvature > 0) & (size > goal), size / curvature, 0.0)
        y = y + step * direction
        rest = rest - step * image
        new = (rest * rest).sum(-1, keepdim=True)
        direction = rest + torch.where(size > 0, new / size, 0.0) * direction
        size = new
    return y


def softness(matrices: Tensor) -> Tensor:
    """Return mean row entropy over log d: 0 for a permutation, 1 for the uniform matrix, (..., d, d) -> (...)."""
    if matrices.shape[-1] < 2:
        return matrices.new_zeros(matrices.shape[:-2])
    entropy: Tensor = torch.special.entr(matrices).sum(-1).mean(-1)
    return entropy / math.log(matrices.shape[-1])
