"""Solve linear systems with many matrices, one at a time, and verify the solutions.

In some CPU builds of torch (such as 2.13), batched LU with more than one thread is wrong from 192 rows on and raises
from 224 on. A single matrix is correct, as are QR and Cholesky. So LU is called without a batch here, and every
solution is verified: X P = V must hold for the sum of the rows. A matrix that is singular to the precision of its data
type is solved in float64.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from enfold.errors import EnfoldError

Inverse = Literal["exact", "transpose", "none"]

REMEDY = "lower the temperature or the learning rate, start from a matching (matched=12), or add a ridge (ridge=0.1)"


def divide(values: Tensor, matrix: Tensor, name: str = "the matrix", inverse: Inverse = "exact") -> Tensor:
    """Return V P^-1, (k, d) and (d, d) -> (k, d), differentiable in both; errors call the matrix `name`.

    Args:
        values: V, (k, d).
        matrix: P, (d, d).
        name: The name of the matrix in errors.
        inverse: How P is inverted.
    """
    return divide_each(values.unsqueeze(0), matrix.unsqueeze(0), name, inverse)[0]


def divide_each(values: Tensor, matrices: Tensor, name: str = "a matrix", inverse: Inverse = "exact") -> Tensor:
    """Return V P^-1 for each of n matrices: (n, k, d) and (n, d, d) -> (n, k, d), differentiable in both.

    Args:
        values: V.
        matrices: P.
        name: What errors call the matrix.
        inverse: What stands for P^-1: itself, Pᵀ ("transpose"), or nothing ("none", which returns V).

    Raises:
        Singular: If the inverse of a matrix consists of rounding errors.
    """
    if values.ndim != 3 or matrices.shape != (len(values), *2 * values.shape[-1:]):
        raise EnfoldError(
            f"values (k, d) are divided by a matrix (d, d), got {tuple(values.shape[1:])} and "
            f"{tuple(matrices.shape[1:])}, {len(values)} and {len(matrices)} of them: pass one row per unit"
        )
    if inverse != "exact":
        return values @ matrices.mT if inverse == "transpose" else values
    found: Tensor = _Divide.apply(values, matrices, name)  # type: ignore[no-untyped-call]
    return found


def condition(matrices: Tensor) -> Tensor:
    """Return the ratio of the largest to the smallest singular value of each, (n, d, d) -> (n,), in float64."""
    found = [torch.linalg.svdvals(matrix.detach().double()) for matrix in matrices]
    return torch.stack([values[0] / values[-1] for values in found])


class Singular(EnfoldError):
    """A matrix has no inverse, or its inverse consists of rounding errors."""


def _refusal(matrices: Tensor, name: str, smallest: float) -> EnfoldError:
    odd = matrices[~matrices.isfinite()]
    if len(odd):
        return EnfoldError(f"a soft permutation must be finite, but {name} contains {odd[0]}: lower the learning rate")
    return Singular(
        f"a soft permutation must be invertible, but {name} is singular to the precision of {matrices.dtype} "
        f"(its smallest pivot is {smallest:.1e} of the largest): {REMEDY}"
    )


class _Factors:
    """LU of each of n matrices, in the precision that it needs."""

    def __init__(self, matrices: Tensor, name: str) -> None:
        rounding = torch.finfo(matrices.dtype).eps
        least = matrices.shape[-1] * rounding
        self.matrices = matrices
        smallest = self._factorise()
        if not smallest > least and matrices.dtype != torch.float64:
            least = rounding  # of the data type of the matrix: below it, the inverse has no correct digits
            self.matrices = matrices.double()
            smallest = self._factorise()
        if not smallest > least:
            raise _refusal(matrices, name, smallest)

    def _factorise(self) -> float:
        """Return the smallest pivot over the largest, the minimum over all matrices; 0 if there is none."""
        found = [torch.linalg.lu_factor_ex(matrix) for matrix in self.matrices]
        self.factors = [(factors, pivots) for factors, pivots, _ in found]
        diagonals = torch.stack([factors.diagonal() for factors, _ in self.factors]).abs()
        return float((diagonals.amin(-1) / diagonals.amax(-1)).nan_to_num(0.0).min()) if diagonals.numel() else 1.0

    def solve(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Return X with X P = V, or X Pᵀ = V, for each."""
        wide = values.to(self.matrices.dtype)
        found = torch.stack(
            [
                torch.linalg.lu_solve(*own, each, left=False, adjoint=transposed)
                for own, each in zip(self.factors, wide, strict=True)
            ]
        )
        matrices = self.matrices.mT if transposed else self.matrices
        right = solves(found, matrices, wide)
        if not bool(right.all()):
            for index in (~right).nonzero()[:, 0].tolist():
                found[index] = by_least_squares(wide[index], matrices[index])
        return found.to(values.dtype)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, matrices: Tensor, name: str) -> Tensor:
        ctx.factors = _Factors(matrices, name)
        found: Tensor = ctx.factors.solve(values)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (found,) = ctx.saved_tensors
        of_values = ctx.factors.solve(grads[0], transposed=True)
        of_matrices = -(found.mT @ of_values) if ctx.needs_input_grad[1] else None
        return of_values, of_matrices, None


def solves(found: Tensor, matrices: Tensor, values: Tensor) -> Tensor:
    """Return whether X P = V holds for the sum of the rows, up to rounding, for each: (n, k, d) -> (n,)."""
    whole, sizes = found.sum(-2, keepdim=True), found.abs().sum(-2, keepdim=True)
    error = (whole @ matrices - values.sum(-2, keepdim=True)).abs().amax((-1, -2))
    rounding = matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    allowed = 10 * rounding * (sizes @ matrices.abs()).amax((-1, -2))
    return error <= allowed + torch.finfo(matrices.dtype).tiny


def by_least_squares(values: Tensor, matrix: Tensor) -> Tensor:
    """Return V P^-1 by QR, which is slower."""
    found: Tensor = torch.linalg.lstsq(matrix.mT, values.mT, driver="gels").solution.mT
    return found
