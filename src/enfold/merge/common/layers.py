"""Layers whose units can be watched: where they lie in a layer's input, its output and its weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

PRODUCERS = (nn.Linear, _ConvNd)
NORMS = (_BatchNorm, nn.GroupNorm)


def produced_axis(layer: nn.Module) -> int:
    """Return the axis of the weight for a layer's outputs."""
    return 1 if isinstance(layer, _ConvTransposeNd | nn.Embedding) else 0


def consumed_axis(layer: nn.Module) -> int | None:
    """Return the axis of the weight for a layer's inputs; None if they are divided among groups."""
    if isinstance(layer, _ConvNd):
        return None if layer.groups > 1 else 0 if isinstance(layer, _ConvTransposeNd) else 1
    return 1 if isinstance(layer, nn.Linear) else None


def has_torch_forward(layer: nn.Module) -> bool:
    """Return whether a layer computes what its PyTorch class does; a derived class may override that."""
    kind = type(layer)
    base = next(one for one in kind.__mro__ if one.__module__.startswith("torch.nn.modules."))
    same = all(getattr(kind, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
    return same and "forward" not in vars(layer)


def channel_axis(layer: nn.Module, value: Tensor) -> int:
    """Return the axis of an input or output for the units, if the layer computes what its PyTorch class does."""
    if isinstance(layer, _ConvNd):
        return value.ndim - 1 - len(layer.kernel_size)
    if isinstance(layer, nn.LayerNorm):  # of channels and their places, as of channels alone
        return value.ndim - len(layer.normalized_shape)
    return 1 if isinstance(layer, NORMS) else value.ndim - 1


def shows_outputs(layer: nn.Module) -> bool:
    """Return whether units of the weight correspond one to one to entries of the layer's output."""
    if isinstance(layer, _ConvTransposeNd) and layer.groups > 1:
        return False
    return isinstance(layer, (*PRODUCERS, *NORMS, nn.Embedding, nn.LayerNorm))
