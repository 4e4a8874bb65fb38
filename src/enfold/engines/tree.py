"""A tree of tensors under the dotted names of a network's own, so that a state_dict reads like the network's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from enfold.engines.skeleton import State


class Tree(nn.Module):
    """Parameters and buffers in containers that mirror the network's modules."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self._plant(name, tensor)
        self._where = dict[str, tuple[nn.Module, str, str]]()  # not the dictionaries: torch.export exchanges those
        for prefix, module in self.named_modules():
            for kind in ("_parameters", "_buffers"):
                for key in getattr(module, kind):
                    self._where[f"{prefix}.{key}" if prefix else key] = (module, kind, key)

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
        return {name: getattr(module, kind)[key] for name, (module, kind, key) in self._where.items()}
