"""Memory layout: how stacked parameters lie in memory, and where convolutions run in channels-last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

NARROW = 16  # channels


def runs_channels_last(network: nn.Module) -> bool:
    """Whether the network convolves, and may do so in channels-last.

    With oneDNN 3.12 (torch 2.13) the weight gradient of a narrow 1 x 1 convolution with a stride corrupts memory in
    that layout (oneDNN issue 6035): a network with such a layer keeps the usual layout.
    """
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    return bool(layers) and not any(_is_hazardous(layer) for layer in layers)


def _is_hazardous(layer: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    pointwise = all(size == 1 for size in layer.kernel_size)
    return pointwise and max(layer.stride) > 1 and layer.in_channels // layer.groups < NARROW


def owners(network: nn.Module, *, batched_products: bool) -> dict[int, nn.Module]:
    """The layer that decides about a parameter's layout, by the parameter's id.

    A loop keeps linear weights as they are in the network, and so gives the same bits as a network alone.
    """
    layers: tuple[type[nn.Module], ...] = (nn.Linear,) if batched_products else ()
    if runs_channels_last(network):
        layers += (nn.Conv2d, nn.ConvTranspose2d)
    return {
        id(parameter): module
        for module in network.modules()
        if isinstance(module, layers)
        for parameter in module.parameters(recurse=False)
    }


def stack(tensors: Sequence[Tensor], layer: nn.Module | None) -> Tensor:
    """(M, ...). A linear weight lies in memory as (M, in, out), as its gradient in a batched product does: the gradient
    is then taken over without a copy, a fifth of a training step. A kernel that is used in channels-last lies so.
    """
    if isinstance(layer, nn.Linear) and tensors[0].ndim == 2:
        return torch.stack([tensor.t() for tensor in tensors]).transpose(1, 2)
    if layer is not None and tensors[0].ndim == 4:
        return torch.stack([tensor.permute(0, 2, 3, 1) for tensor in tensors]).permute(0, 1, 4, 2, 3)
    return torch.stack(list(tensors))
