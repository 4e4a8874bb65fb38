"""One form for every layer: (groups, outputs, inputs, taps), in which s scales the outputs and r the inputs.

A linear layer has one tap; a transposed convolution is turned round; a grouped convolution is as many layers beside
each other as it has groups. An embedding, which has s only, is a layer with one input whose taps are the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.ensemble import Ensemble
from enfold.ensembles.common.efficient import select_layers
from enfold.ensembles.common.layer_shapes import LAYERS, LayerShape, layer_shape
from enfold.errors import EnfoldError


def to_blocks(weight: Tensor, shape: LayerShape) -> Tensor:
    """(..., *the layer's axes) -> (..., groups, outputs, inputs, taps); float64 on the CPU."""
    weight = weight.detach().cpu().double()
    lead = weight.shape[: weight.ndim - shape.axes]
    if not shape.inputs:
        return weight.mT.reshape(*lead, 1, shape.outputs, 1, -1)
    outputs, inputs = shape.outputs // shape.groups, shape.inputs // shape.groups
    if shape.transposed:
        return weight.reshape(*lead, shape.groups, inputs, outputs, -1).transpose(-3, -2)
    return weight.reshape(*lead, shape.groups, outputs, inputs, -1)


def from_blocks(blocks: Tensor, shape: LayerShape, size: torch.Size) -> Tensor:
    """(groups, outputs, inputs, taps) -> the layer's own axes, of this size."""
    if not shape.inputs:
        return blocks[0, :, 0].mT
    return (blocks.transpose(-3, -2) if shape.transposed else blocks).reshape(size)


def member_layers(members: Ensemble) -> dict[str, LayerShape]:
    """The layers that a BatchEnsemble scales, by the names of their weights' modules with a dot behind."""
    if not isinstance(members, Ensemble):
        raise EnfoldError(
            f"weights are compared between members of one architecture, got {type(members).__name__}: "
            "use DeepEnsemble([...]) of networks"
        )
    layers = select_layers(members.skeleton.network, LAYERS, (), ())
    return {f"{name}." if name else "": layer_shape(layer) for name, layer in layers.items()}


def layer_name(prefix: str) -> str:
    """As a user reads it; a network that is a single layer has no name for it."""
    return prefix.removesuffix(".") or "(the network)"


def finite_blocks(weight: Tensor, shape: LayerShape, prefix: str) -> Tensor:
    """The blocks of all members, (M, groups, outputs, inputs, taps), refused if a member has diverged."""
    blocks = to_blocks(weight, shape)
    bad = (~blocks.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        raise EnfoldError(
            f"weights must be finite to be compared, but '{prefix}weight' of member {bad[0]} is not: leave it out"
        )
    return blocks
