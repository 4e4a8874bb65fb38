"""Layers: replace and resize them in copies; the given network is not modified."""

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


def replace_modules(network: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the network with other layers under these names; "" is the network itself."""
    if "" in layers:
        return layers[""]
    twin = copy_network(network)
    old = {id(twin.get_submodule(name)): layer for name, layer in layers.items()}
    for module in list(twin.modules()):
        for key, child in module._modules.items():
            if id(child) in old:  # a module that appears twice is replaced twice
                module._modules[key] = old[id(child)]
    return twin


def require_resizable(layer: nn.Module, name: str = "") -> None:
    """Raise an error for a layer with more state than its PyTorch class, which might depend on its widths.

    Such state is that of fake quantisation, parametrizations, pruning masks, hooks, and of the user's own classes.
    """
    base = next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    more = next(_more_than(_smallest(base), layer, exact=type(layer) is base), None)
    if more is not None:
        where = f"'{name}' ({type(layer).__name__})" if name else f"this {type(layer).__name__}"
        raise EnfoldError(
            f"a layer must have no more state than a {base.__name__} to be resized, but {where} also has '{more}': "
            "remove weight norm, spectral norm, pruning, quantisation and hooks first, or use a method that does not "
            "change widths"
        )


def refuse_channel_quantisation(network: nn.Module) -> None:
    """Raise an error for fake quantisation per channel, which would read past its scales behind a wider layer."""
    for name, module in network.named_modules():
        scale = module._buffers.get("scale")
        if hasattr(module, "fake_quant_enabled") and scale is not None and scale.numel() > 1:
            raise EnfoldError(
                f"network must be widened before it is quantised per channel, but '{name}' ({type(module).__name__}) "
                f"has the scales of {scale.numel()} channels: prepare it for quantisation afterwards"
            )


def _more_than(plain: nn.Module, layer: nn.Module, *, exact: bool) -> Iterator[str]:
    """Yield the names of state that a layer has and a plain one does not; flags and strings do not depend on widths."""
    for held in ("_parameters", "_buffers", "_modules"):
        yield from (key for key in vars(layer)[held] if key not in vars(plain)[held])
    for key, value in vars(layer).items():
        attached = key == "forward" or (key.endswith("_hooks") and value)
        added = not exact and key not in vars(plain) and not (value is None or isinstance(value, bool | str))
        if attached or added:
            yield key


def _smallest(kind: Any) -> nn.Module:
    """Return a layer of a PyTorch class with one channel, on the meta device."""
    ones = (
        (1, 1, 1) if issubclass(kind, CONVOLUTIONS) else (1,) if issubclass(kind, _NormBase | nn.LayerNorm) else (1, 1)
    )
    made: nn.Module = kind(*ones, device="meta")
    return made


def resize_layer(layer: nn.Module, inputs: int, outputs: int, groups: int = 1, *, name: str = "") -> nn.Module:
    """Return a copy of a linear layer or a convolution with other widths.

    Args:
        layer: The layer.
        inputs: The new number of inputs.
        outputs: The new number of outputs.
        groups: The new number of groups of a convolution.
        name: The name of the layer for error messages.

    Returns:
        The copy. Values at indices that exist in both are copied, others are 0.
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
    """Change the shape of a tensor of a module; new values are 0."""
    held: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    old: Tensor | None = held.get(key)
    if old is None:
        return
    new = old.detach().new_zeros(tuple(shape))
    common = tuple(slice(min(sizes)) for sizes in zip(old.shape, shape, strict=True))
    new[common] = old.detach()[common]
    held[key] = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
