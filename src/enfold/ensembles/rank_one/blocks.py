"""Blocks: one layout for the weights of all layers, (groups, outputs, inputs, taps); s scales outputs and r inputs.

A linear layer has one tap, and the axes of a transposed convolution are exchanged. An embedding, which has s only, is
a layer with one input whose taps are the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.ensemble import Ensemble
from enfold.ensembles.common.efficient import select_layers
from enfold.ensembles.common.layer_shapes import LAYERS, LayerShape, layer_shape
from enfold.errors import EnfoldError


def to_blocks(weight: Tensor, shape: LayerShape) -> Tensor:
    """Return weights as blocks, (..., *axes) -> (..., groups, outputs, inputs, taps), in float64 on the CPU."""
    weight = weight.detach().cpu().double()
    lead = weight.shape[: weight.ndim - shape.axes]
    if not shape.inputs:
        return weight.mT.reshape(*lead, 1, shape.outputs, 1, -1)
    outputs, inputs = shape.outputs // shape.groups, shape.inputs // shape.groups
    if shape.transposed:
        return weight.reshape(*lead, shape.groups, inputs, outputs, -1).transpose(-3, -2)
    return weight.reshape(*lead, shape.groups, outputs, inputs, -1)


def from_blocks(blocks: Tensor, shape: LayerShape, size: torch.Size) -> Tensor:
    """Return the weight of a layer from its blocks, (groups, outputs, inputs, taps) -> `size`."""
    if not shape.inputs:
        return blocks[0, :, 0].mT
    return (blocks.transpose(-3, -2) if shape.transposed else blocks).reshape(size)


def member_layers(members: Ensemble) -> dict[str, LayerShape]:
    """Return the layers that a BatchEnsemble scales, by the prefix of their tensors, which ends with a dot."""
    if not isinstance(members, Ensemble) or not members.is_expandable:
        raise EnfoldError(
            f"members must be networks of one architecture, got {type(members).__name__}: use DeepEnsemble"
        )
    layers = select_layers(members.skeleton.network, LAYERS, (), ())
    return {f"{name}." if name else "": layer_shape(layer) for name, layer in layers.items()}


def layer_name(prefix: str) -> str:
    """Return the name of a layer for tables; a network that is a single layer has an empty name."""
    return prefix.removesuffix(".") or "(the network)"


def finite_blocks(weight: Tensor, shape: LayerShape, prefix: str) -> Tensor:
    """Return the blocks of all members, (M, groups, outputs, inputs, taps).

    Raises:
        EnfoldError: If a weight is not finite.
    """
    blocks = to_blocks(weight, shape)
    bad = (~blocks.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        raise EnfoldError(
            f"weights must be finite to be compared, but '{prefix}weight' of member {bad[0]} is not: remove that member"
        )
    return blocks
