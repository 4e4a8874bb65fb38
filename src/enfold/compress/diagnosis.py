"""Diagnosis: the gain of an ensemble over its members, and the routes that can recover it, from a few batches.

    gain          = mean_m L(p_m) - L(p̄)                                                               (1)
    unfinished    = L(θ) - L(θ after one more epoch at a small learning rate)                          (2)

L is the criterion of the task on validation examples: NLL for classes. Members whose barriers are small lie in one
basin (`enfold.merge.basin_check`): then their weights may be averaged. If (2) exceeds (1), members should be trained
longer before they are compressed.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enfold.compress.explain import shown_gain
from enfold.data import Data, Split
from enfold.engines.copying import copy_network
from enfold.ensemble import Ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge.basin_check import BasinReport, basin_check
from enfold.metrics import (
    GaussianPredictions,
    PointPredictions,
    Predictions,
    QuantilePredictions,
    beyond_noise,
    evaluate_calibrated,
    example_nll,
    gain_recovered,
    metrics_for,
    nll,
    paired_bootstrap,
    pairwise_kl,
    per_member,
)
from enfold.metrics.multilabel import MultilabelPredictions, example_label_nll
from enfold.metrics.predictions import RowPredictions
from enfold.metrics.regression import example_density_nll, example_pinball, example_squared_error
from enfold.tasks import Task
from enfold.train import TrainConfig, fit

SMALL_RATE = 0.1  # of the learning rate, for the continuation (2)
PAIRS = 3  # members beside the first between which barriers are measured
SOME = 2048  # examples
PER_EXAMPLE: dict[type, Callable[[Any], torch.Tensor]] = {
    Predictions: example_nll,
    MultilabelPredictions: example_label_nll,
    GaussianPredictions: example_density_nll,
    PointPredictions: example_squared_error,
    QuantilePredictions: example_pinball,
}


@dataclass(frozen=True)
class Diagnosis:
    """Measurements before the first trial; losses are the criterion on validation examples.

    Args:
        criterion: The metric by which networks are compared; lower is better.
        mean_member: Mean loss of the members.
        best_member: Index of the member with the lowest loss.
        best_member_loss: Its loss.
        ensemble: Loss of the ensemble.
        gain: The interval of the ensemble's gain over the mean member, from a bootstrap of the examples.
        calibrated_fraction: The fraction of the gain in NLL that one member with a temperature recovers; None if it is
            not defined.
        basin: The barriers between members; None if members have no weights in common.
        unfinished: How much one more epoch at a small learning rate improves a member; None if not measured.
        training_disagreement: Disagreement of the members on training examples relative to validation examples; None
            if not measured.
        epoch_seconds: Duration of one epoch of a member; None if not measured.
    """

    criterion: str
    mean_member: float
    best_member: int
    best_member_loss: float
    ensemble: float
    gain: tuple[float, float]
    calibrated_fraction: float | None = None
    basin: BasinReport | None = None
    unfinished: float | None = None
    training_disagreement: float | None = None
    epoch_seconds: float | None = None

    @property
    def has_gain(self) -> bool:
        """True if the ensemble is better than its mean member beyond noise."""
        return self.ensemble < self.mean_member and beyond_noise(self.gain)

    @property
    def is_one_basin(self) -> bool:
        """Return whether members lie in one basin, so that their weights may be averaged."""
        return self.basin is not None and self.basin.is_one_basin

    @property
    def needs_training(self) -> bool:
        """Return whether one more epoch improves a member by more than the ensemble improves on it."""
        return self.unfinished is not None and self.unfinished > max(self.mean_member - self.ensemble, 0.0)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Return the findings, one sentence each."""
        name = self.criterion.upper()
        found = [
            f"Ensemble {name} {self.ensemble:.4f}, mean member {self.mean_member:.4f}: a gain of "
            f"{self.mean_member - self.ensemble:.4f} ({self.gain[0]:.4f} to {self.gain[1]:.4f})."
        ]
        if not self.has_gain:
            found.append("The gain of the ensemble is within noise: there is little to compress.")
        if self.needs_training:
            found.append(
                f"Members are not fully trained: one more epoch improves a member by {self.unfinished:.4f}. Train them "
                "longer first."
            )
        if self.calibrated_fraction is not None:
            found.append(f"A temperature alone gives one member {shown_gain(self.calibrated_fraction)} of the gain.")
        if self.basin is not None:
            text = str(self.basin)
            found.append(f"{text[0].upper()}{text[1:]}.")
        if self.training_disagreement is not None and self.training_disagreement < 0.2:
            found.append(
                "Members agree on their training examples: targets from augmented or mixed examples say more than "
                "cached ones."
            )
        return found


def example_losses(p: RowPredictions) -> torch.Tensor:
    """Return the criterion of each example, (N,)."""
    function: Callable[[Any], torch.Tensor] = next(PER_EXAMPLE[kind] for kind in type(p).__mro__ if kind in PER_EXAMPLE)
    return function(p)


def diagnose(members: Ensemble, data: Data, task: Task, config: TrainConfig, *, continuation: bool = True) -> Diagnosis:
    """Return the diagnosis of an ensemble.

    Args:
        members: The ensemble; it is not changed.
        data: Training and validation examples.
        task: What the outputs mean.
        config: Settings of the training, for the continuation.
        continuation: Whether to train one member for one more epoch.
    """
    found = predict(members, data.val, task=task)
    table = metrics_for(found)
    criterion = table[found.criterion]
    losses = per_member(criterion, found)
    best = int(losses.argmin())
    gain = paired_bootstrap(per_member(example_losses, found).mean(0), example_losses(found))  # (1)
    unfinished, seconds = None, None
    if continuation:
        started = clock.monotonic()
        unfinished = _measure_unfinished(members, best, data, task, config, float(losses[best]))
        seconds = None if unfinished is None else clock.monotonic() - started
    return Diagnosis(
        criterion=found.criterion,
        mean_member=float(losses.mean()),
        best_member=best,
        best_member_loss=float(losses[best]),
        ensemble=criterion(found),
        gain=gain,
        calibrated_fraction=_calibrated_fraction(found),
        basin=_check_basin(members, data, task),
        unfinished=unfinished,
        training_disagreement=_training_disagreement(members, data, task, found),
        epoch_seconds=seconds,
    )


def _calibrated_fraction(p: RowPredictions) -> float | None:
    """Return the fraction of the gain that a temperature gives one member, by fitting it on every second example."""
    if type(p) is not Predictions or len(p) < 100:
        return None
    fitted, scored = (Predictions(p.log_probs[:, half::2], p.labels[half::2], weights=p.weights) for half in (0, 1))
    own = [nll(scored.member(index)) for index in range(p.num_members)]
    calibrated = [evaluate_calibrated(nll, scored.member(index), fitted.member(index)) for index in range(len(own))]
    mean, after = (sum(values) / len(values) for values in (own, calibrated))
    found = gain_recovered(after, mean, nll(scored), higher_is_better=False)
    return found if found == found else None


def _check_basin(members: Ensemble, data: Data, task: Task) -> BasinReport | None:
    """Return whether a few members lie in one basin; None if they have no weights in common."""
    if not members.is_expandable or members.num_members < 2:
        return None
    few = members[list(range(min(members.num_members, 1 + PAIRS)))]
    try:
        return basin_check(few, data.val, data.train, points=3, task=task)
    except EnfoldError:  # networks that cannot be averaged
        return None


def _measure_unfinished(
    members: Ensemble, index: int, data: Data, task: Task, config: TrainConfig, before: float
) -> float | None:
    """Return (2): how much one more epoch improves the best member."""
    if not (members.is_expandable or isinstance(members, MixedEnsemble)):
        return None
    network: nn.Module = copy_network(members.member(index))
    rate = config.lr if isinstance(config.lr, float) else config.lr[0]
    settings = config.replace(epochs=1, lr=SMALL_RATE * rate, schedule="constant", select="last", patience=None)
    settings = settings.replace(
        warmup_epochs=0.0, task=task, ema=None, tail="none", weight_decay=0.0, label_smoothing=0.0
    )
    fit(network, data.replace(val=[]), config=settings, quiet=True)
    found = predict(network, data.val, task=task)
    return before - metrics_for(found)[found.criterion](found)


def _training_disagreement(members: Ensemble, data: Data, task: Task, validation: RowPredictions) -> float | None:
    """Return how much members disagree on training examples, relative to validation examples."""
    if type(validation) is not Predictions or not isinstance(data.train, Split) or members.num_members < 2:
        return None
    some = data.train[torch.arange(min(len(data.train), SOME))]
    on_training = pairwise_kl(predict(members, some, task=task))
    on_validation = pairwise_kl(validation)
    return on_training / on_validation if on_validation > 0 else None
