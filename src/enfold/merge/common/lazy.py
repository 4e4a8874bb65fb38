"""A weight that is a sum of products, multiplied out only where that is less work than using it factor by factor.

    x W̄ᵀ = x Aᵀ + Σ_n w_n (((x Q_n^-ᵀ) W_nᵀ) P_nᵀ),   W̄ = A + Σ_n w_n P_n W_n Q_n^-1          (1)

With fewer rows x than a layer has units, the left side of (1) from right to left is a fraction of the work of W̄.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.engines.skeleton import Skeleton
from enfold.merge.common.solve import Inverse, divide_each
from enfold.symmetry import Axis, Group


@dataclass(frozen=True)
class Terms:
    """All n of equation (1)."""

    factors: Tensor  # w, (n,)
    given: Tensor  # W, (n, out, in)
    left: Tensor | None  # P, (n, out, out); None: outputs are not mixed
    right: Tensor | None  # Q, (n, in, in); None: inputs are not mixed
    name: str  # of Q, for an error
    inverse: Inverse = "exact"  # what stands for Q^-1

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product with inputs, (rows, in) -> (rows, out)."""
        if self.right is None:  # one product for all n, which reads the rows once
            found = (rows @ self.given.flatten(0, 1).mT).unflatten(1, self.given.shape[:2]).movedim(1, 0)
        else:
            seen = divide_each(rows.expand(len(self.given), -1, -1), self.right.mT, self.name, self.inverse)
            found = seen @ self.given.mT
        return self._sum(found if self.left is None else found @ self.left.mT)

    def product(self) -> Tensor:
        """Return the weight, (out, in)."""
        found = self.given if self.left is None else self.left @ self.given
        return self._sum(found if self.right is None else divide_each(found, self.right, self.name, self.inverse))

    def work(self, rows: int) -> int:
        """Return the number of multiplications of `applied` for each n."""
        _, outputs, width = self.given.shape
        return rows * (self._mixes(self.right) * width**2 + width * outputs + self._mixes(self.left) * outputs**2)

    def work_of_product(self) -> int:
        """Return the number of multiplications of `product` for each n."""
        _, outputs, width = self.given.shape
        return outputs * width * (self._mixes(self.right) * width + self._mixes(self.left) * outputs)

    @staticmethod
    def _mixes(matrices: Tensor | None) -> bool:
        return matrices is not None

    def _sum(self, each: Tensor) -> Tensor:
        return (self.factors @ each.flatten(1)).view(each.shape[1:])


class Lazy:
    """A lazy W̄ of an `nn.Linear`; all operations but the layer's product use the tensor."""

    def __init__(self, constant: Tensor, terms: Terms) -> None:
        self.constant, self.terms = constant, terms

    @cached_property
    def tensor(self) -> Tensor:
        """W̄."""
        return self.constant + self.terms.product()

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W̄ᵀ + b, computed in the faster way."""
        outputs, width = self.constant.shape
        rows = inputs.reshape(-1, width)
        if self.terms.work(len(rows)) >= self.terms.work_of_product():
            return F.linear(inputs, self.tensor, bias)
        found = F.linear(rows, self.constant, bias) + self.terms.multiply(rows)
        return found.view(*inputs.shape[:-1], outputs)

    @property
    def dtype(self) -> torch.dtype:
        """Known without the product."""
        return self.constant.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kinds: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a PyTorch function with the tensors in place of the lazy weights."""
        kinds = kinds or {}
        if function is F.linear and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[1].linear(args[0], *args[2:], **kinds)
        plain = [each.tensor if isinstance(each, cls) else each for each in args]
        return function(*plain, **{key: each.tensor if isinstance(each, cls) else each for key, each in kinds.items()})


def lazy_weights(skeleton: Skeleton, groups: Sequence[Group]) -> dict[str, tuple[int | None, int | None]]:
    """Return the weights of plain linear layers, with the groups that contain all outputs and all inputs."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for module in skeleton.network.modules():
        if type(module) is not nn.Linear:
            continue
        name = skeleton.names_in(module).get("weight")
        if name is None:
            continue  # it is computed from others: pruned, or of a norm and a direction
        axes = [(k, axis) for k, group in enumerate(groups) for axis in group.axes if axis.name == name]
        left = [k for k, axis in axes if axis.axis == 0 and _whole(axis, module.out_features, "produces")]
        right = [k for k, axis in axes if axis.axis == 1 and _whole(axis, module.in_features, "consumes")]
        used_once = len(skeleton.parameters[name]) == 1
        if axes and used_once and len(left) + len(right) == len(axes) and max(len(left), len(right)) == 1:
            found[name] = (next(iter(left), None), next(iter(right), None))
    return found


def _whole(axis: Axis, units: int, role: str) -> bool:
    return axis.role == role and axis.tied_to is None and (axis.size, axis.outer, axis.inner) == (units, 1, 1)
