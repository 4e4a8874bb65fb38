"""A tree of tensors under the dotted names of a network's own, so that a state_dict reads like the network's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from enfold.members.skeleton import Place, State, places


class Tree(nn.Module):
    """Parameters and buffers in containers that mirror the network's modules."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self._plant(name, tensor)
        parameters, buffers = places(self)
        self._where: dict[str, Place] = {name: where[0] for name, where in {**parameters, **buffers}.items()}

    def _plant(self, name: str, tensor: Tensor) -> None:
        *path, key = name.split(".")
        container: nn.Module = self
        for part in path:
            container = container._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            container._parameters[key] = tensor
        else:
            container._buffers[key] = tensor

    def state(self) -> State:
        """What is stored, by name."""
        return {name: held[key] for name, (held, key) in self._where.items()}  # type: ignore[misc]
