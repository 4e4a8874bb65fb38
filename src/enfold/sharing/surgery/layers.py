"""Layers exchanged and resized in copies; what is given is left untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from enfold.errors import EnfoldError
from enfold.members.copying import copied

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
LAYERS = (nn.Linear, *CONVOLUTIONS)


def replaced(network: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with other layers under these names ("" is the network itself); the network given is left untouched."""
    if "" in layers:
        return layers[""]
    twin = copied(network)
    old = {id(twin.get_submodule(name)): layer for name, layer in layers.items()}
    for module in list(twin.modules()):
        for key, part in module._modules.items():
            if id(part) in old:  # a module that appears twice is replaced twice
                module._modules[key] = old[id(part)]
    return twin


def resized(layer: nn.Module, inputs: int, outputs: int, groups: int = 1) -> nn.Module:
    """A copy of a linear layer or a convolution with other widths; values that still have a place are kept in it."""
    if is_parametrized(layer) or "weight" not in layer._parameters:
        raise EnfoldError(
            f"a layer is resized by its weight, but that of {type(layer).__name__} is computed from other tensors: "
            "remove weight or spectral norm first"
        )
    twin: Any = copied(layer)
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
