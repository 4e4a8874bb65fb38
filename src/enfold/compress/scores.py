"""Scores and costs of what a search tries, relative to the members."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from enfold.cost import flops, stored_bytes
from enfold.data import Data, Split
from enfold.data.convert import first_inputs
from enfold.ensemble import Ensemble
from enfold.evaluate import predict
from enfold.metrics import calibrated_nll, gain_recovered, metrics_for
from enfold.metrics.predictions import RowPredictions
from enfold.tasks import StudentTask, Task

CALIBRATED = "cnll"


@dataclass(frozen=True)
class Scores:
    """The references of a search, and the measurement of others.

    Args:
        data: The data; scores are of validation examples.
        task: What the outputs of the members mean.
        criterion: The metric by which networks are compared.
        mean_member: Mean scores of the members.
        ensemble: Scores of the ensemble.
        member: The network that costs are relative to; None if members do not exist as networks.
    """

    data: Data
    task: Task
    criterion: str
    mean_member: dict[str, float]
    ensemble: dict[str, float]
    member: nn.Module | None

    def of(self, network: nn.Module) -> dict[str, float]:
        """Return the scores of a network or of the mean prediction of an ensemble."""
        task = self.task if isinstance(network, Ensemble) else StudentTask(teacher=self.task)
        found = predict(network.eval(), self.data.val, task=task)
        return all_scores(found)

    def gain(self, scores: dict[str, float]) -> float:
        """Return the fraction of the ensemble's gain over its mean member."""
        names = (self.criterion, "mse", "nll")
        criterion = next(name for name in names if name in scores and name in self.ensemble)
        mean, ensemble = self.mean_member[criterion], self.ensemble[criterion]
        return gain_recovered(scores[criterion], mean, ensemble, higher_is_better=False)

    def calibrated_gain(self, scores: dict[str, float]) -> float:
        """Return the fraction of the ensemble's gain in the NLL after calibration; NaN if it is not defined."""
        known = self.mean_member, self.ensemble, scores
        if not all(CALIBRATED in each for each in known):
            return math.nan
        mean, ensemble, own = (each[CALIBRATED] for each in known)
        return gain_recovered(own, mean, ensemble, higher_is_better=False)

    def cost(self, network: nn.Module) -> float:
        """Return the operations of a prediction relative to one member."""
        if self.member is None or _has_same_shapes(network, self.member):
            return 1.0
        inputs = self._example()
        try:
            # For the same batch, whose number of examples cancels; a batch of graphs does not show it.
            return flops(network, inputs, examples=1) / flops(self.member, inputs, examples=1)
        except (ZeroDivisionError, RuntimeError, TypeError):  # operations that are not counted
            sizes = [sum(p.numel() for p in each.parameters()) for each in (network, self.member)]
            passes = network.num_members if isinstance(network, Ensemble) else 1
            return max(sizes[0] / max(1, sizes[1]), float(passes))

    def size(self, network: nn.Module) -> float:
        """Return the bytes of a network or ensemble relative to one member."""
        if self.member is None:
            return 1.0
        return stored_bytes(network) / max(1, stored_bytes(self.member))

    def _example(self) -> Any:
        if isinstance(self.data.train, Split):
            return self.data.prepare(self.data.train.inputs[:2])
        return first_inputs(self.data.train)


def all_scores(found: RowPredictions) -> dict[str, float]:
    """Return all metrics of the task, and the NLL after calibration as "cnll" if it is defined."""
    scores = {name: metric(found) for name, metric in metrics_for(found).items()}
    calibrated = calibrated_nll(found)
    return scores if calibrated is None else scores | {CALIBRATED: calibrated}


def rank(scores: dict[str, float], criterion: str, ensemble: float) -> float:
    """Return what networks are chosen by, lower is better: the criterion, or for an NLL

        cNLL + max(0, NLL - NLL of the ensemble)

    A temperature is free. By the NLL alone, training on mixed labels, which calibrates, would be preferred to what the
    ensemble knows; so the NLL counts only as far as it is above that of the ensemble.

    Args:
        scores: The scores of a network on validation examples.
        criterion: The criterion of the task.
        ensemble: The criterion of the ensemble.
    """
    own = scores.get(criterion, math.inf)
    if criterion != "nll" or CALIBRATED not in scores:
        return own
    return scores[CALIBRATED] + max(0.0, own - ensemble)


def _has_same_shapes(one: nn.Module, other: nn.Module) -> bool:
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (one, other)]
    return type(one) is type(other) and shapes[0] == shapes[1]
