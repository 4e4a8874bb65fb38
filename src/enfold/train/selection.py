"""Which epoch's weights are kept: each member's best by validation NLL; and when a member stopped getting better."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from enfold.ensemble import Ensemble
from enfold.train.optimize import trained_members


class Selection:
    """The best weights so far, the start among them: training on may not make a trained network worse.

    Members that own all their parameters are chosen one by one, others as a whole. Epochs are counted as trained so
    far: 0 is the start.
    """

    def __init__(self, model: nn.Module, patience: int | None) -> None:
        self.model = model
        self.patience = patience
        self.by_member = isinstance(model, Ensemble) and model.owns_all_parameters
        self.count = trained_members(model) if self.by_member else 1
        self.nll = [math.inf] * self.count
        self.epoch = [0] * self.count
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, epoch: int, validation_nll: list[float]) -> None:
        """Keep the weights of those that got better and have not stopped."""
        if self.by_member:
            values = validation_nll * self.count if len(validation_nll) == 1 else validation_nll  # judged as a whole
        else:
            values = [sum(validation_nll) / len(validation_nll)]
        better = [
            value < best and not self.stopped(k, epoch)
            for k, (value, best) in enumerate(zip(values, self.nll, strict=True))
        ]
        current = self.model.state_dict()
        if not self.state:
            self.state = {name: _copied(tensor) for name, tensor in current.items()}
        for index in (k for k, improved in enumerate(better) if improved):
            self.nll[index], self.epoch[index] = values[index], epoch
            for name, tensor in current.items():
                if self.by_member:
                    self.state[name][index].copy_(tensor[index])
                elif isinstance(tensor, Tensor):
                    self.state[name].copy_(tensor)
                else:
                    self.state[name] = _copied(tensor)

    def stopped(self, index: int, epoch: int) -> bool:
        """Whether this member's patience ran out before `epoch`."""
        return self.patience is not None and epoch - self.epoch[index] > self.patience

    def finished(self, epoch: int) -> bool:
        """Whether no member can still get better after `epoch`."""
        return all(self.stopped(index, epoch + 1) for index in range(self.count))

    def apply(self) -> None:
        """Put the chosen weights into the model."""
        if self.state:
            self.model.load_state_dict(self.state)

    def record(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"nll": [None if math.isinf(value) else value for value in self.nll], "epoch": self.epoch}

    def restore(self, record: dict[str, Any], state: dict[str, Tensor]) -> None:
        """The inverse of `record`."""
        self.nll = [math.inf if value is None else value for value in record["nll"]]
        self.epoch, self.state = list(record["epoch"]), state


def _copied(value: Any) -> Any:
    """A tensor of a state dict, or what `get_extra_state` returned, as it is now."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
