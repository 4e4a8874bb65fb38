"""Cuts: resize one layer, or the tensors and attributes of a module, by a table of widths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.engines.copying import copy_network
from enfold.ensembles.common.surgery.layers import LAYERS, cut_tensor, require_resizable, resize_layer
from enfold.errors import EnfoldError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
WIDTH_PRESERVING = (*NORMS, nn.MultiheadAttention)  # outputs are as wide as inputs
NARROWABLE = (*LAYERS, *EMBEDDINGS, *WIDTH_PRESERVING)


def widths_of(layer: nn.Module) -> tuple[int, int]:
    """Return the widths of inputs and outputs; 0 for the inputs of an embedding, 1 for a norm over several axes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, EMBEDDINGS):
        return 0, layer.embedding_dim
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim, layer.embed_dim
    if isinstance(layer, nn.LayerNorm):
        width = layer.normalized_shape[0] if len(layer.normalized_shape) == 1 else 1
        return width, width
    if isinstance(layer, _NormBase):
        return layer.num_features, layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels, layer.num_channels
    known: Any = layer
    return known.in_channels, known.out_channels


def cut_layer(
    name: str, layer: nn.Module, inward: int, outward: int, more_groups: int, table: Mapping[int, int]
) -> nn.Module:
    """Return a copy of a layer with other widths, and up to `more_groups` times the groups of a convolution.

    Args:
        name: The name of the layer, for messages.
        layer: The layer.
        inward: The new width of the inputs.
        outward: The new width of the outputs.
        more_groups: The factor on the groups of a convolution.
        table: The new width for each width of the network.
    """
    if isinstance(layer, LAYERS):
        return resize_layer(layer, inward, outward, _groups(layer, inward, outward, more_groups), name=name)
    require_resizable(layer, name)
    twin: Any = copy_network(layer)
    if isinstance(layer, EMBEDDINGS):
        twin.embedding_dim = outward
        cut_tensor(twin, "weight", (twin.num_embeddings, outward))
    elif isinstance(layer, nn.MultiheadAttention):
        _cut_attention(name, twin, outward)
    elif isinstance(layer, nn.LayerNorm):
        twin.normalized_shape = _normalized_shape(name, layer, table)
        for key in ("weight", "bias"):
            cut_tensor(twin, key, twin.normalized_shape)
    else:
        if isinstance(layer, nn.GroupNorm):
            twin.num_channels, twin.num_groups = outward, _most_groups(layer.num_groups, outward)
        else:
            twin.num_features = outward
        for key in ("weight", "bias", "running_mean", "running_var"):
            cut_tensor(twin, key, (outward,))
    return twin  # type: ignore[no-any-return]


def _groups(layer: nn.Module, inward: int, outward: int, more: int) -> int:
    if isinstance(layer, nn.Linear):
        return 1
    known: Any = layer
    is_depthwise = known.groups == known.in_channels > 1 and outward % inward == 0  # which it remains
    groups = inward if is_depthwise else _most_groups(known.groups, inward, outward)
    return groups * math.gcd(more, inward // groups, outward // groups)


def _most_groups(wanted: int, *widths: int) -> int:
    """Return the largest number of groups, at most `wanted`, that divides all widths."""
    return next(groups for groups in range(wanted, 0, -1) if not any(width % groups for width in widths))


def _cut_attention(name: str, twin: Any, width: int) -> None:
    if not twin._qkv_same_embed_dim:
        raise EnfoldError(
            f"attention must have keys and values as wide as queries to be narrowed, but '{name}' has its own kdim or "
            "vdim: use a method that does not change widths"
        )
    twin.embed_dim = twin.kdim = twin.vdim = width
    twin.head_dim = width // twin.num_heads
    cut_tensor(twin, "in_proj_weight", (3 * width, width))
    cut_tensor(twin, "in_proj_bias", (3 * width,))
    for key in ("bias_k", "bias_v"):
        cut_tensor(twin, key, (1, 1, width))
    twin.out_proj = resize_layer(twin.out_proj, width, width, name=f"{name}.out_proj")


def _normalized_shape(name: str, layer: nn.LayerNorm, table: Mapping[int, int]) -> tuple[int, ...]:
    shape = tuple(layer.normalized_shape)
    axis = _hidden_axis(name, shape, table)
    return shape if axis is None else (*shape[:axis], table[shape[axis]], *shape[axis + 1 :])


def cut_tensors(name: str, module: nn.Module, table: Mapping[int, int]) -> None:
    """Resize the parameters and buffers of a module that is not a known layer, in place."""
    theirs = type(module).__module__.startswith("torch.")
    for held in (module._parameters, module._buffers):
        for key, tensor in list(held.items()):
            if not isinstance(tensor, Tensor) or tensor.numel() < 2:
                continue
            full = f"{name}.{key}" if name else key
            if theirs:
                raise EnfoldError(
                    f"network must consist of layers that can be narrowed, got '{name}', a {type(module).__name__}: "
                    "use a method that does not change widths"
                )
            axis = _hidden_axis(full, tuple(tensor.shape), table)
            if axis is not None:
                cut_tensor(module, key, [table[size] if k == axis else size for k, size in enumerate(tensor.shape)])


def _hidden_axis(name: str, shape: tuple[int, ...], table: Mapping[int, int]) -> int | None:
    """Return the axis that is a hidden width; the last one for a tensor common to all examples, (1, ..., width)."""
    axes = [axis for axis, size in enumerate(shape) if size > 1 and size in table]
    if len(axes) > 1 and not (shape[0] == 1 and axes[-1] == len(shape) - 1):
        raise EnfoldError(
            f"tensors that are not in a layer must have one axis that is a hidden width, but '{name}' of shape {shape} "
            f"has {len(axes)} such axes: move it into a layer, or use a method that does not change widths"
        )
    return axes[-1] if axes else None


def cut_attributes(module: nn.Module, table: Mapping[int, int]) -> None:
    """Change the integer attributes of a user's module that are hidden widths, in place."""
    if type(module).__module__.startswith("torch."):
        return
    for key, value in list(vars(module).items()):
        if type(value) is int and value > 1 and value in table:
            setattr(module, key, table[value])
