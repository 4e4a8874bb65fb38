"""Calibrators: maps of log-probabilities that are fitted on validation data.

    temperature   q = softmax(log p / T)                                                    (1)
    vector        q = softmax(w ∘ log p + b)                                                (2)
    matrix        q = softmax(W log p + b)                                                  (3)

where log p for M members is one of

    "ensemble"    the log of the mean probability: averaged, then calibrated                (4)
    "logit_mean"  the mean of the members' log-probabilities (equivalently, logits)         (5)
    "members"     each member's log-probabilities, with a separate map for each member      (6)

(4) is the default: an average of calibrated members is under-confident (Rahaman, Thiery, "Uncertainty quantification
and deep ensembles", NeurIPS 2021, arXiv 2007.08792).

(1) to (3): Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, arXiv 1706.04599, for
logits. For log-probabilities, (3) is the Dirichlet calibration of Kull et al., NeurIPS 2019, arXiv 1910.12656.

Differs from the paper: a small penalty pulls (2) and (3) towards the identity. Without it they have no minimum if every
label is the most probable class, and overfit if there are many classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, ensemble_log_probs, member_log_probs
from enfold.metrics.predictions import Predictions
from enfold.metrics.temperature import fit_temperature, has_same_examples
from enfold.metrics.weights import weighted_mean

FitOn = Literal["ensemble", "members", "logit_mean"]
FLOOR = -100.0  # lower bound of log-probabilities: 0 times minus infinity is NaN
STEPS = 500  # maximum number of L-BFGS iterations; about 30 are typical


@dataclass(frozen=True)
class Calibrator:
    """A fitted calibrator. Call it with predictions on other examples than those it was fitted on.

    Args:
        weight: Matrix that multiplies the log-probabilities.
        bias: Vector that is added to them.
        fit_on: What was calibrated: "ensemble", "logit_mean" or "members".
        validation: Predictions on which it was fitted.
    """

    weight: Tensor  # (1 or M, C, C): W of (3), diagonal in (1) and (2)
    bias: Tensor  # (1 or M, C)
    fit_on: FitOn
    validation: Predictions = field(repr=False)

    def __call__(self, p: Predictions) -> Predictions:
        """Return calibrated predictions: M = 1, or M members with `fit_on="members"`.

        Args:
            p: Predictions of the same members.

        Raises:
            EnfoldError: If `p` are the predictions the calibrator was fitted on, or have other members or classes.
        """
        if has_same_examples(p, self.validation):
            raise EnfoldError(
                "p must be predictions on other examples than the calibrator was fitted on, got the same predictions: "
                "fit it on validation data, then call it with the test predictions"
            )
        return self.apply(p)

    def apply(self, p: Predictions) -> Predictions:
        """Return calibrated predictions as `__call__` does, but allow those the calibrator was fitted on."""
        if p.log_probs.shape[::2] != self.validation.log_probs.shape[::2]:
            raise EnfoldError(
                "p must have the members and classes that the calibrator was fitted on, got log_probs of shape "
                f"{tuple(p.log_probs.shape)} instead of {tuple(self.validation.log_probs.shape)}: fit another one"
            )
        mapped = [
            _apply_map(one, weight, bias)
            for one, weight, bias in zip(_map_inputs(p, self.fit_on), self.weight, self.bias, strict=True)
        ]
        found = Predictions.from_logits(torch.stack(mapped), p.labels.cpu())
        return found.with_weights(p.weights) if self.fit_on == "members" else found


@dataclass(frozen=True)
class TemperatureScaler:
    """Temperature scaling, equation (1): changes confidences and never the most probable class.

    Args:
        fit_on: What log p is: "ensemble", "logit_mean" or "members", equations (4) to (6).
    """

    fit_on: FitOn = "ensemble"

    def fit(self, validation: Predictions) -> Calibrator:
        """Return the calibrator whose temperature has the lowest NLL on these predictions."""
        labels = class_labels(validation)
        maps = []
        for one in _map_inputs(validation, self.fit_on):
            found = fit_temperature(Predictions(one[None], labels))
            maps.append(torch.eye(validation.num_classes, dtype=torch.float64) / found)
        weight = torch.stack(maps)
        return Calibrator(weight, torch.zeros(weight.shape[:2], dtype=torch.float64), self.fit_on, validation)


@dataclass(frozen=True)
class VectorScaler:
    """Vector scaling, equation (2): one scale and one offset per class.

    Args:
        fit_on: What log p is: "ensemble", "logit_mean" or "members", equations (4) to (6).
        penalty: Weight of the squared distance to the identity, which is added to the NLL.
    """

    fit_on: FitOn = "ensemble"
    penalty: float = 1e-4

    diagonal: ClassVar[bool] = True

    def fit(self, validation: Predictions) -> Calibrator:
        """Return the calibrator whose map has the lowest NLL plus penalty on these predictions.

        Raises:
            EnfoldError: If `penalty` is negative or `fit_on` is unknown.
        """
        if not self.penalty >= 0:
            raise EnfoldError(f"penalty must not be negative, got {self.penalty}: use for example penalty=1e-4")
        labels = class_labels(validation)
        maps = [_fit_map(one, labels, self.penalty, self.diagonal) for one in _map_inputs(validation, self.fit_on)]
        weight, bias = (torch.stack(each) for each in zip(*maps, strict=True))
        return Calibrator(weight, bias, self.fit_on, validation)


@dataclass(frozen=True)
class MatrixScaler(VectorScaler):
    """Matrix scaling, equation (3): C² + C parameters, for many validation examples and few classes.

    Args:
        fit_on: What log p is: "ensemble", "logit_mean" or "members", equations (4) to (6).
        penalty: Weight of the squared distance to the identity, which is added to the NLL.
    """

    diagonal: ClassVar[bool] = False


def _map_inputs(p: Predictions, fit_on: FitOn) -> Tensor:
    """Return log p: (1, N, C), or (M, N, C) with "members"."""
    if fit_on not in get_args(FitOn):
        raise EnfoldError(f"fit_on must be one of {get_args(FitOn)}, got {fit_on!r}: choose one of these")
    if fit_on == "members":
        return member_log_probs(p)  # (6)
    if fit_on == "logit_mean":
        return weighted_mean(member_log_probs(p).clamp(min=FLOOR), p.weights)[None].log_softmax(-1)  # (5)
    return ensemble_log_probs(p)[None]  # (4)


def _apply_map(log_probs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return W log p + b: (N, C) -> (N, C)."""
    return log_probs.clamp(min=FLOOR) @ weight.T + bias  # (1), (2), (3)


def _fit_map(log_probs: Tensor, labels: Tensor, penalty: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return W (C, C) and b (C,), found by L-BFGS from the identity."""
    log_probs = log_probs.clone()  # autograd refuses tensors from inference mode
    C = log_probs.shape[-1]
    free = torch.zeros((C,) if diagonal else (C, C), dtype=torch.float64, requires_grad=True)  # W - I
    bias = torch.zeros(C, dtype=torch.float64, requires_grad=True)
    identity = torch.eye(C, dtype=torch.float64)
    optimiser = torch.optim.LBFGS(
        [free, bias], max_iter=STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def weight() -> Tensor:
        return identity + (free.diag() if diagonal else free)

    def loss() -> Tensor:
        optimiser.zero_grad()
        nll = torch.nn.functional.cross_entropy(_apply_map(log_probs, weight(), bias), labels)
        value = nll + penalty * (free.square().sum() + bias.square().sum())
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    return weight().detach(), bias.detach()
