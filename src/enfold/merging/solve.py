"""Solving with many matrices, one at a time, and looking at what came out.

In some builds of torch for CPUs (2.13 is one), batched LU with more than one thread gives wrong numbers from 192 rows
on, and raises from 224 on (pytorch issue 142815). One matrix at a time is right there, as are QR and Cholesky. So no
call here has a batch, and every solution is probed: X P = V must hold for one combination of its columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError

REMEDY = "lower the temperature, start from a matching (matched=12), or use members in float64"


def divide(values: Tensor, matrix: Tensor, name: str = "the matrix") -> Tensor:
    """V P^-1, (k, d) and (d, d) -> (k, d), differentiable in both.

    A matrix that is singular to the precision of its numbers is refused; `name` is what the error calls it.
    """
    if values.ndim != 2 or matrix.shape != 2 * values.shape[-1:]:
        raise EnfoldError(
            f"values (k, d) are divided by a matrix (d, d), got {tuple(values.shape)} and {tuple(matrix.shape)}: "
            "give one row a unit"
        )
    found: Tensor = _Divide.apply(values, matrix, name)  # type: ignore[no-untyped-call]
    return found


def divide_each(values: Tensor, matrices: Tensor) -> Tensor:
    """V P^-1 for each of n matrices: (n, k, d) and (n, d, d) -> (n, k, d)."""
    names = [f"matrix {index} of {len(matrices)}" for index in range(len(matrices))]
    return torch.stack([divide(*each) for each in zip(values, matrices, names, strict=True)])


def condition(matrices: Tensor) -> Tensor:
    """The ratio of the largest to the smallest singular value of each, (n, d, d) -> (n,), in float64."""
    found = [torch.linalg.svdvals(matrix.detach().double()) for matrix in matrices]
    return torch.stack([values[0] / values[-1] for values in found])


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, matrix: Tensor, name: str) -> Tensor:
        factors, pivots, info = torch.linalg.lu_factor_ex(matrix)
        diagonal = factors.diagonal().abs()
        smallest = float(diagonal.min() / diagonal.max()) if len(diagonal) else 1.0
        if int(info) or not smallest > len(diagonal) * torch.finfo(matrix.dtype).eps:
            raise EnfoldError(
                f"a soft permutation must be invertible, but {name} is singular to the precision of {matrix.dtype} "
                f"(its smallest pivot is {smallest:.1e} of the largest): {REMEDY}"
            )
        found: Tensor = torch.linalg.lu_solve(factors, pivots, values, left=False)
        if not solves(found, matrix, values):
            found = by_least_squares(values, matrix)
        ctx.save_for_backward(factors, pivots, matrix, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        factors, pivots, matrix, found = ctx.saved_tensors
        of_values = torch.linalg.lu_solve(factors, pivots, grads[0], left=False, adjoint=True)
        if not solves(of_values, matrix.mT, grads[0]):
            of_values = by_least_squares(grads[0], matrix.mT)
        of_matrix = -(found.mT @ of_values) if ctx.needs_input_grad[1] else None
        return of_values, of_matrix, None


def solves(found: Tensor, matrix: Tensor, values: Tensor) -> bool:
    """Whether X P = V holds for the sum of the rows, up to what rounding may do."""
    whole, sizes = found.sum(0), found.abs().sum(0)
    error = (whole @ matrix - values.sum(0)).abs().max()
    rounding = len(matrix) * torch.finfo(matrix.dtype).eps
    allowed = 10 * rounding * (sizes @ matrix.abs()).max()
    return bool(error <= allowed + torch.finfo(matrix.dtype).tiny)


def by_least_squares(values: Tensor, matrix: Tensor) -> Tensor:
    """V P^-1 by QR, which is slower."""
    found: Tensor = torch.linalg.lstsq(matrix.mT, values.mT, driver="gels").solution.mT
    return found
