"""One batch norm over M batches that lie apart in memory, with hand-written gradients.

With the mean μ_m and the variance v_m of each of M batches of n values a channel, N = M n:

    μ = (1/M) Σ_m μ_m,   v = (1/M) Σ_m (v_m + (μ_m - μ)²),   y = γ (x - μ) / σ + β,   σ² = v + ε       (1)
    dβ = Σ dy,   dγ = Σ dy (x - μ) / σ,   dx = (γ / σ) (dy - dβ / N - (x - μ) / σ · dγ / N)             (2)

It is what `F.batch_norm` gives for the batches put together, without putting them together: a tensor of more than
32 MB is fetched from the system anew in every step, which takes longer than to normalise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def joint_batch_norm(
    parts: Sequence[Tensor],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    """(1) for batches of one shape in train mode; running statistics are updated in place."""
    first = parts[0]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        rows = F.batch_norm(torch.cat(list(parts)), running_mean, running_var, weight, bias, True, momentum, eps)
        return list(rows.chunk(len(parts)))
    with torch.no_grad():
        stats = [torch.batch_norm_update_stats(part, None, None, 0.0) for part in parts]
        means, variances = (torch.stack(values) for values in zip(*stats, strict=True))  # (M, C)
        mean = means.mean(0)
        variance = variances.mean(0) + means.var(0, correction=0)
        count = len(parts) * first.numel() // len(mean)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    outputs: tuple[Tensor, ...] = _Joint.apply(weight, bias, mean, variance, count, eps, *parts)  # type: ignore[no-untyped-call]
    return list(outputs)


class _Joint(torch.autograd.Function):
    """The last of (1), with the gradients (2)."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, mean, variance, *parts)
        ctx.count, ctx.eps = count, eps
        return tuple(torch.native_batch_norm(part, weight, bias, mean, variance, False, 0.0, eps)[0] for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, variance, *parts = ctx.saved_tensors
        backward, every = torch.ops.aten.native_batch_norm_backward, [True, True, True]
        scale = (variance + ctx.eps).rsqrt()  # 1 / σ
        weight = torch.ones_like(scale) if weight is None else weight
        found = [
            backward(grad, part, weight, mean, variance, None, None, False, ctx.eps, every)  # (γ / σ) dy, dγ_m, dβ_m
            for grad, part in zip(grads, parts, strict=True)
        ]
        of_weight, of_bias = (torch.stack([one[k] for one in found]).sum(0) for k in (1, 2))
        slope = -weight * scale.square() * of_weight / ctx.count
        shift = -weight * scale * of_bias / ctx.count - slope * mean
        shape = (-1, *(1,) * (parts[0].ndim - 2))
        # (2) is what was found, plus a linear function of x
        of_parts = [
            one[0].addcmul_(part, slope.view(shape)).add_(shift.view(shape))
            for one, part in zip(found, parts, strict=True)
        ]
        needed = [
            given if wanted else None for given, wanted in zip((of_weight, of_bias), ctx.needs_input_grad, strict=False)
        ]
        return *needed, None, None, None, None, *of_parts
