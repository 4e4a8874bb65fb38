"""Comparison of the results of two runs: outputs, buffers and gradients that differ by more than rounding errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

OUTPUTS = "the outputs"
GRADIENT = "the gradients of "  # before the name of a parameter
TOLERANCE = 1e-4  # relative to the largest value of a tensor; ten times as much for gradients


def find_difference(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    tolerance: float = TOLERANCE,
    *,
    equal_nan: bool = True,
) -> str | None:
    """Return the name of the first tensor that differs by more than rounding errors, or None.

    Args:
        expected: Tensors by name, among them `OUTPUTS`. The names of gradients begin with `GRADIENT`; they have one
            scale, and ten times the tolerance.
        found: Tensors with the same names.
        tolerance: The error relative to the largest value of a tensor; at least the precision of the outputs.
        equal_nan: Whether values that are NaN in both are equal.
    """
    tolerance = max(tolerance, precision(expected[OUTPUTS]))
    floor: float | None = None  # the gradient of a bias before a batch norm consists of rounding errors alone
    for name in dict.fromkeys([*expected, *found]):
        tensor, other = expected.get(name), found.get(name)
        if tensor is None or other is None or other.shape != tensor.shape or other.device != tensor.device:
            return name
        error = _max_abs(other.double() - tensor.double() if _is_counter(tensor) else other - tensor)
        if error == 0:
            continue
        if name.startswith(GRADIENT):
            if floor is None:
                floor = 0.1 * max(_scale(each) for key, each in expected.items() if key.startswith(GRADIENT))
            allowed = 10 * tolerance * max(_scale(tensor), floor)
        else:
            allowed = tolerance * max(_scale(tensor), 1e-6)
        # NaN: infinite or NaN values at the same or at different places.
        is_near = torch.allclose(other, tensor, 0.0, allowed, equal_nan) if math.isnan(error) else error <= allowed
        if not is_near:
            return name
    return None


def precision(outputs: Tensor) -> float:
    """Return the relative rounding error of the type in which outputs were computed."""
    device = outputs.device.type
    return torch.finfo(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else outputs.dtype).eps


def _is_counter(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _max_abs(tensor: Tensor) -> float:
    """Return the largest absolute value, which takes a tenth of the time of `torch.allclose`."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().amax())
    # `amax` is fast for all strides, unlike `max` and `aminmax`.
    return max(-float(tensor.amin()), float(tensor.amax()))


def _scale(tensor: Tensor) -> float:
    """Return the largest finite absolute value."""
    if tensor.dtype == torch.bool:
        return 0.0
    size = _max_abs(tensor)
    return size if math.isfinite(size) else _max_abs(tensor[torch.isfinite(tensor)])
