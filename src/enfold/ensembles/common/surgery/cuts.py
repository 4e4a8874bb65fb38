"""Cuts: one layer, or the tensors and numbers that a module holds itself, made as narrow as a table of widths says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.engines.copying import copy_network
from enfold.ensembles.common.surgery.layers import LAYERS, cut_tensor, require_resizable, resized
from enfold.errors import EnfoldError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
KEEPING = (*NORMS, nn.MultiheadAttention)  # what they return is as wide as what they get
NARROWABLE = (*LAYERS, *EMBEDDINGS, *KEEPING)


def widths_of(layer: nn.Module) -> tuple[int, int]:
    """What a layer takes and what it gives; an embedding takes no width, and a norm over several axes has none."""
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
    """A copy of a layer with other widths; a convolution has `more_groups` times as many groups, if they divide it."""
    if isinstance(layer, LAYERS):
        return resized(layer, inward, outward, _groups(layer, inward, outward, more_groups), name=name)
    require_resizable(layer, name)
    twin: Any = copy_network(layer)
    if isinstance(layer, EMBEDDINGS):
        twin.embedding_dim = outward
        cut_tensor(twin, "weight", (twin.num_embeddings, outward))
    elif isinstance(layer, nn.MultiheadAttention):
        _cut_attention(name, twin, outward)
    elif isinstance(layer, nn.LayerNorm):
        twin.normalized_shape = _normalised(name, layer, table)
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
    each_alone = known.groups == known.in_channels > 1 and outward % inward == 0  # depth-wise stays so
    groups = inward if each_alone else _most_groups(known.groups, inward, outward)
    return groups * math.gcd(more, inward // groups, outward // groups)


def _most_groups(wanted: int, *widths: int) -> int:
    """As many groups as divide the widths, up to those wanted."""
    return next(groups for groups in range(wanted, 0, -1) if not any(width % groups for width in widths))


def _cut_attention(name: str, twin: Any, width: int) -> None:
    if not twin._qkv_same_embed_dim:
        raise EnfoldError(
            f"attention is narrowed if keys and values are as wide as queries, but '{name}' has its own kdim or vdim: "
            "use a method that keeps widths"
        )
    twin.embed_dim = twin.kdim = twin.vdim = width
    twin.head_dim = width // twin.num_heads
    cut_tensor(twin, "in_proj_weight", (3 * width, width))
    cut_tensor(twin, "in_proj_bias", (3 * width,))
    for key in ("bias_k", "bias_v"):
        cut_tensor(twin, key, (1, 1, width))
    twin.out_proj = resized(twin.out_proj, width, width, name=f"{name}.out_proj")


def _normalised(name: str, layer: nn.LayerNorm, table: Mapping[int, int]) -> tuple[int, ...]:
    shape = tuple(layer.normalized_shape)
    axis = _hidden_axis(name, shape, table)
    return shape if axis is None else (*shape[:axis], table[shape[axis]], *shape[axis + 1 :])


def cut_own(name: str, module: nn.Module, table: Mapping[int, int]) -> None:
    """The parameters and buffers of a module that is no known layer, in place."""
    theirs = type(module).__module__.startswith("torch.")
    for held in (module._parameters, module._buffers):
        for key, tensor in list(held.items()):
            if not isinstance(tensor, Tensor) or tensor.numel() < 2:
                continue
            full = f"{name}.{key}" if name else key
            if theirs:
                raise EnfoldError(
                    f"a network is narrowed layer by layer, but how is not known of '{name}', a "
                    f"{type(module).__name__}: use a method that keeps widths"
                )
            axis = _hidden_axis(full, tuple(tensor.shape), table)
            if axis is not None:
                cut_tensor(module, key, [table[size] if k == axis else size for k, size in enumerate(tensor.shape)])


def _hidden_axis(name: str, shape: tuple[int, ...], table: Mapping[int, int]) -> int | None:
    """The axis that is a hidden width; of a tensor that all examples share, (1, ..., width), the last."""
    axes = [axis for axis, size in enumerate(shape) if size > 1 and size in table]
    if len(axes) > 1 and not (shape[0] == 1 and axes[-1] == len(shape) - 1):
        raise EnfoldError(
            f"a tensor outside of a layer is narrowed along the axis that is a hidden width, but '{name}' of shape "
            f"{shape} has {len(axes)} such axes: put it in a layer, or use a method that keeps widths"
        )
    return axes[-1] if axes else None


def cut_attributes(module: nn.Module, table: Mapping[int, int]) -> None:
    """The whole numbers among the attributes of a module of the user's own that are hidden widths, in place."""
    if type(module).__module__.startswith("torch."):
        return
    for key, value in list(vars(module).items()):
        if type(value) is int and value > 1 and value in table:
            setattr(module, key, table[value])
