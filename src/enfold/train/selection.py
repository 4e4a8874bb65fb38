"""Select the weights of each member's best epoch by the validation loss, and stop members that no longer improve."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from enfold.ensemble import Ensemble
from enfold.train.optimize import trained_members


class Selection:
    """The best weights so far, including the initial ones: training cannot make a trained network worse.

    Members that own all their parameters are selected individually, others together. Epochs are counted as completed
    epochs: 0 is the start.
    """

    def __init__(self, model: nn.Module, patience: int | None) -> None:
        self.model = model
        self.patience = patience
        self.by_member = isinstance(model, Ensemble) and model.owns_all_parameters
        self.count = trained_members(model) if self.by_member else 1
        self.best = [math.inf] * self.count
        self.epoch = [0] * self.count
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, epoch: int, validation_loss: list[float]) -> None:
        """Store the weights of members that improved and have not stopped."""
        if self.by_member:
            values = validation_loss * self.count if len(validation_loss) == 1 else validation_loss  # evaluated jointly
        else:
            values = [sum(validation_loss) / len(validation_loss)]
        better = [
            value < best and not self.has_stopped(k, epoch)
            for k, (value, best) in enumerate(zip(values, self.best, strict=True))
        ]
        current = self.model.state_dict()
        if not self.state:
            self.state = {name: _copy(tensor) for name, tensor in current.items()}
        for index in (k for k, improved in enumerate(better) if improved):
            self.best[index], self.epoch[index] = values[index], epoch
            for name, tensor in current.items():
                if self.by_member:
                    self.state[name][index].copy_(tensor[index])
                elif isinstance(tensor, Tensor):
                    self.state[name].copy_(tensor)
                else:
                    self.state[name] = _copy(tensor)

    def has_stopped(self, index: int, epoch: int) -> bool:
        """Return whether this member's patience ran out before `epoch`."""
        return self.patience is not None and epoch - self.epoch[index] > self.patience

    def is_finished(self, epoch: int) -> bool:
        """Return whether no member can improve after `epoch`."""
        return all(self.has_stopped(index, epoch + 1) for index in range(self.count))

    def apply(self) -> None:
        """Load the selected weights into the model."""
        if self.state:
            self.model.load_state_dict(self.state)

    def record(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"best": [None if math.isinf(value) else value for value in self.best], "epoch": self.epoch}

    def restore(self, record: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Invert `record`."""
        self.best = [math.inf if value is None else value for value in record["best"]]
        self.epoch, self.state = list(record["epoch"]), state


def _copy(value: Any) -> Any:
    """Return a copy of a tensor of a state dict, or of what `get_extra_state` returned."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
