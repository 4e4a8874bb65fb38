"""Memory layout: of stacked parameters, and of images, which convolutions on a CPU process faster in channels-last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import map_tensors

NARROW = 16  # channels


def runs_channels_last(network: nn.Module) -> bool:
    """Return whether the network has convolutions, and may run them in channels-last.

    With oneDNN 3.12 (torch 2.13) the weight gradient of a narrow 1 x 1 convolution with a stride corrupts memory in
    that layout (oneDNN issue 6035): a network with such a layer runs in the default layout.
    """
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    return bool(layers) and not any(_is_hazardous(layer) for layer in layers)


def _is_hazardous(layer: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    pointwise = all(size == 1 for size in layer.kernel_size)
    return pointwise and max(layer.stride) > 1 and layer.in_channels // layer.groups < NARROW


def arrange_images(inputs: Any, channels_last: bool, *, copy: bool = False) -> Any:
    """Return images on a CPU in channels-last if requested, and other inputs unchanged.

    Args:
        inputs: A batch: a tensor (B, ...), or a structure of tensors, each of which is arranged.
        channels_last: Whether images are wanted in channels-last.
        copy: Whether the caller modifies the result in place, so that it must be a new tensor.
    """
    if not isinstance(inputs, Tensor):
        needed = channels_last or copy
        return map_tensors(lambda each: arrange_images(each, channels_last, copy=copy), inputs) if needed else inputs
    if channels_last and inputs.ndim == 4 and inputs.device.type == "cpu":
        arranged = inputs.contiguous(memory_format=torch.channels_last)
        return arranged.clone() if copy and arranged is inputs else arranged
    return inputs.clone() if copy else inputs


def arrange_for(network: nn.Module, inputs: Any) -> Any:
    """Return images in channels-last if the network has convolutions and runs on a CPU: up to twice as fast."""
    has_images = inputs.ndim == 4 if isinstance(inputs, Tensor) else True
    return arrange_images(inputs, has_images and runs_channels_last(network))


def find_owners(network: nn.Module, *, batched_products: bool) -> dict[int, nn.Module]:
    """Return the layers that determine the layout of their parameters, by the id of the parameter.

    Args:
        network: The network.
        batched_products: Whether linear layers run as batched products. A loop keeps the layout of linear weights, and
            so gives the same bits as a single network.
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
    """Stack the tensors of M members: (M, ...), in the layout that suits the layer.

    A linear weight is stored as (M, in, out), like its gradient in a batched product: accumulating the gradient then
    needs no copy, which is a fifth of a training step. The kernel of a channels-last convolution is channels-last.
    """
    if isinstance(layer, nn.Linear) and tensors[0].ndim == 2:
        return torch.stack([tensor.t() for tensor in tensors]).transpose(1, 2)
    if layer is not None and tensors[0].ndim == 4:
        return torch.stack([tensor.permute(0, 2, 3, 1) for tensor in tensors]).permute(0, 1, 4, 2, 3)
    return torch.stack(list(tensors))
