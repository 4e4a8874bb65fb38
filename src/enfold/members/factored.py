"""A linear weight that members share up to two vectors, applied without making the members' own weights.

    Y_m = s_m ∘ ((r_m ∘ X_m) W^T) + b_m                                                      (1)

One product with W serves all members. Its gradients, with dZ_m = s_m ∘ dY_m:

    dW = Σ_m dZ_m^T (r_m ∘ X_m),   dr_m = Σ_b X_m ∘ (dZ_m W),   dX_m = r_m ∘ (dZ_m W)        (2)

Where X needs no gradient, as in the first layer, P_m = dZ_m^T X gives both at the price of one product:

    dW = Σ_m P_m ∘ (1 r_m^T),   dr_m = Σ_o W ∘ P_m                                           (3)

PyTorch's own gradient of (1) takes three large products a layer and keeps every intermediate value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Factored:
    """W_m = W ∘ (s_m r_m^T) for a linear layer; stands in a state for the stacked weights."""

    weight: Tensor  # (out, in)
    r: Tensor  # (M, in)
    s: Tensor  # (M, out)

    def __len__(self) -> int:
        return len(self.r)

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """(1): (B, in) or (M, B, in) -> (M, B, out)."""
        if bias is None:
            bias = self.s.new_zeros(1, 1)
        if torch.is_autocast_enabled(inputs.device.type) or not torch.is_grad_enabled():
            return _forward(inputs, self.weight, self.r, self.s, bias)[0]
        outputs: Tensor = _Product.apply(inputs, self.weight, self.r, self.s, bias)  # type: ignore[no-untyped-call]
        return outputs


def _forward(inputs: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scaled = (inputs * r.unsqueeze(1)).flatten(0, 1)  # (M * B, in)
    product = (scaled @ weight.t()).view(len(r), -1, len(weight))
    return torch.addcmul(bias.unsqueeze(1), product, s.unsqueeze(1)), product  # (1)


class _Product(torch.autograd.Function):
    """Equation (1) with the gradients (2) and (3)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        outputs, product = _forward(inputs, weight, r, s, bias)
        ctx.save_for_backward(inputs, weight, r, s, product)
        ctx.bias_members = len(bias), bias.shape[1]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, r, s, product = ctx.saved_tensors
        of_bias = grad.sum(1) if ctx.needs_input_grad[4] else None
        if of_bias is not None and ctx.bias_members[0] == 1 and len(r) > 1:
            of_bias = of_bias.sum(0, keepdim=True)
        of_s = (grad * product).sum(1)
        scaled = grad * s.unsqueeze(1)  # dZ
        if ctx.needs_input_grad[0] or inputs.ndim == 3:
            back = (scaled.flatten(0, 1) @ weight).view(len(r), -1, weight.shape[1])
            of_r = (back * inputs).sum(1)
            seen = (inputs * r.unsqueeze(1)).flatten(0, 1)
            of_weight = scaled.flatten(0, 1).t() @ seen  # (2)
            of_inputs = back.mul_(r.unsqueeze(1))
            if inputs.ndim == 2:
                of_inputs = of_inputs.sum(0)
            return of_inputs, of_weight, of_r, of_s, of_bias
        of_r, of_weight = torch.empty_like(r), torch.zeros_like(weight)
        both, held = torch.empty_like(weight), torch.empty_like(weight)  # used again for each member, so in the cache
        for index in range(len(r)):
            torch.mm(scaled[index].t(), inputs, out=both)  # P_m
            torch.sum(torch.mul(both, weight, out=held), 0, out=of_r[index])
            of_weight.addcmul_(both, r[index])  # (3)
        return None, of_weight, of_r, of_s, of_bias
