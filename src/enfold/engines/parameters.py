"""Stacked parameters: their names in a state_dict, their optimizer groups, and the members that use them in a batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from enfold.engines.skeleton import State
from enfold.errors import UnusedParameterWarning, level_outside

Decay = Literal["all", "weights"]

_ATTRIBUTE = "_used_by"  # of a stacked parameter: for each member, whether it had a gradient
_WARNED: WeakSet[object] = WeakSet()


class Tree(nn.Module):
    """Parameters and buffers with the dotted names of a network, so that a state_dict has the names of the network."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self._add(name, tensor)
        self._where = dict[str, tuple[nn.Module, str, str]]()  # not the dictionaries: torch.export replaces them
        for prefix, module in self.named_modules():
            for kind in ("_parameters", "_buffers"):
                for key in getattr(module, kind):
                    self._where[f"{prefix}.{key}" if prefix else key] = (module, kind, key)

    def _add(self, name: str, tensor: Tensor) -> None:
        *path, key = name.split(".")
        container: nn.Module = self
        for part in path:
            container = container._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            container._parameters[key] = tensor
        else:
            container._buffers[key] = tensor

    def state(self) -> State:
        """Return all tensors by name."""
        return {name: getattr(module, kind)[key] for name, (module, kind, key) in self._where.items()}


def decay_groups(
    parameters: Iterable[tuple[Tensor, int]], weight_decay: float, decay: Decay, **options: Any
) -> list[dict[str, Any]]:
    """Return optimizer groups.

    Args:
        parameters: Parameters, each with its number of axes in the network.
        weight_decay: The weight decay.
        decay: "all" gives one group; "weights" gives two, of which only the first is decayed: parameters with at least
            two axes, so not biases and norms.
        **options: Further entries of each group.
    """
    listed = list(parameters)
    if decay == "all":
        return [{"params": [tensor for tensor, _ in listed], "weight_decay": weight_decay, **options}]
    weights = [tensor for tensor, axes in listed if axes >= 2]
    others = [tensor for tensor, axes in listed if axes < 2]
    return [
        {"params": weights, "weight_decay": weight_decay, **options},
        {"params": others, "weight_decay": 0.0, **options},
    ]


# In a single network, `grad` is None for a parameter that a batch does not use, and optimizers skip it. A stacked
# parameter has one gradient for all members, which is 0 for such a member: an optimizer would apply weight decay and
# momentum. So the members that use a parameter are recorded in the backward pass.


def unbind_and_record(name: str, stacked: Tensor, owner: object) -> Sequence[Tensor]:
    """Return the members' slices of a stacked tensor; the backward pass records which members use a parameter.

    A record that was not read since the last call means that the optimizer does not use it: the user is warned once.

    Args:
        name: The name of the tensor, for the warning.
        stacked: The tensor (M, ...).
        owner: The object for which the warning is given once.
    """
    slices = stacked.unbind(0)
    if not stacked.is_leaf or slices[0].grad_fn is None or torch.compiler.is_compiling():
        return slices
    _warn_of_unused(name, take_used(stacked), owner)

    def record(gradients: tuple[Tensor | None, ...]) -> None:
        record_used(stacked, [gradient is not None for gradient in gradients])

    slices[0].grad_fn.register_prehook(record)
    return slices


def record_used(stacked: Tensor, used: Sequence[bool]) -> None:
    """Add the members that used a stacked parameter to its record."""
    before = getattr(stacked, _ATTRIBUTE, None) or [False] * len(used)
    setattr(stacked, _ATTRIBUTE, [one or other for one, other in zip(before, used, strict=True)])


def take_used(stacked: Tensor) -> list[bool] | None:
    """Return which members used a stacked parameter, or None if all or none did, and clear the record."""
    used: list[bool] | None = getattr(stacked, _ATTRIBUTE, None)
    if used is None:
        return None
    delattr(stacked, _ATTRIBUTE)
    return used if any(used) and not all(used) else None


def _warn_of_unused(name: str, used: list[bool] | None, owner: object) -> None:
    if used is None or owner in _WARNED:
        return
    _WARNED.add(owner)
    warnings.warn(
        f"member {used.index(False)} did not use '{name}' in a batch in which other members did: your optimizer sees a "
        "gradient of 0 and applies weight decay and momentum, which it would not do for a single network; train with "
        "enfold.fit, which skips such parameters",
        UnusedParameterWarning,
        stacklevel=level_outside(),
    )
