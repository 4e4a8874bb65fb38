"""Layers exchanged and resized in copies; what is given is left untouched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.engines.copying import copy_network
from enfold.errors import EnfoldError

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
LAYERS = (nn.Linear, *CONVOLUTIONS)


def replaced(network: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with other layers under these names ("" is the network itself); the network given is left untouched."""
    if "" in layers:
        return layers[""]
    twin = copy_network(network)
    old = {id(twin.get_submodule(name)): layer for name, layer in layers.items()}
    for module in list(twin.modules()):
        for key, part in module._modules.items():
            if id(part) in old:  # a module that appears twice is replaced twice
                module._modules[key] = old[id(part)]
    return twin


def require_resizable(layer: nn.Module, name: str = "") -> None:
    """Refuse a layer that holds more than its PyTorch class does: what depends on its widths would keep the old ones.

    That is fake quantisation, parametrizations, pruning masks, hooks, and whatever else a class of the user's own adds.
    """
    base = next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    more = next(_more_than(_smallest(base), layer, exact=type(layer) is base), None)
    if more is not None:
        where = f"'{name}' ({type(layer).__name__})" if name else f"this {type(layer).__name__}"
        raise EnfoldError(
            f"a layer is resized if it holds nothing but what a {base.__name__} does, but {where} also has '{more}': "
            "remove weight norm, spectral norm, pruning, quantisation and hooks before and add them after, or use a "
            "method that keeps widths"
        )


def refuse_channel_quantisation(network: nn.Module) -> None:
    """Refuse fake quantisation by channel: behind a widened layer its kernel would read past the end of its scales."""
    for name, module in network.named_modules():
        scale = module._buffers.get("scale")
        if hasattr(module, "fake_quant_enabled") and scale is not None and scale.numel() > 1:
            raise EnfoldError(
                f"a network is widened before it is quantised by channel, but '{name}' ({type(module).__name__}) has "
                f"the scales of {scale.numel()} channels: prepare it for quantisation afterwards"
            )


def _more_than(plain: nn.Module, layer: nn.Module, *, exact: bool) -> Iterator[str]:
    """The names of what a layer holds and a plain one does not; flags and words do not depend on widths."""
    for held in ("_parameters", "_buffers", "_modules"):
        yield from (key for key in vars(layer)[held] if key not in vars(plain)[held])
    for key, value in vars(layer).items():
        attached = key == "forward" or (key.endswith("_hooks") and value)
        added = not exact and key not in vars(plain) and not (value is None or isinstance(value, bool | str))
        if attached or added:
            yield key


def _smallest(kind: Any) -> nn.Module:
    """A layer of a PyTorch class with one channel, without values."""
    ones = (
        (1, 1, 1) if issubclass(kind, CONVOLUTIONS) else (1,) if issubclass(kind, _NormBase | nn.LayerNorm) else (1, 1)
    )
    made: nn.Module = kind(*ones, device="meta")
    return made


def resized(layer: nn.Module, inputs: int, outputs: int, groups: int = 1, *, name: str = "") -> nn.Module:
    """A copy of a linear layer or a convolution with other widths; values that still have a place are kept in it.

    `name` is what an error calls the layer.
    """
    require_resizable(layer, name)
    twin: Any = copy_network(layer)
    if isinstance(layer, nn.Linear):
        twin.in_features, twin.out_features = inputs, outputs
        shape: tuple[int, ...] = (outputs, inputs)
    else:
        twin.in_channels, twin.out_channels, twin.groups = inputs, outputs, groups
        channels = (inputs, outputs // groups) if isinstance(layer, TRANSPOSED) else (outputs, inputs // groups)
        shape = (*channels, *twin.weight.shape[2:])
    cut_tensor(twin, "weight", shape)
    cut_tensor(twin, "bias", (outputs,))
    return twin  # type: ignore[no-any-return]


def cut_tensor(module: nn.Module, key: str, shape: Sequence[int]) -> None:
    """The tensor in another shape; a new place holds 0."""
    held: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    old: Tensor | None = held.get(key)
    if old is None:
        return
    new = old.detach().new_zeros(tuple(shape))
    common = tuple(slice(min(sizes)) for sizes in zip(old.shape, shape, strict=True))
    new[common] = old.detach()[common]
    held[key] = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
