"""Calibrators: a map of log-probabilities, fitted on validation data, that makes confidences mean what they say.

    temperature   q = softmax(log p / T)                                                    (1)
    vector        q = softmax(w ∘ log p + b)                                                (2)
    matrix        q = softmax(W log p + b)                                                  (3)

and what log p is, for M members:

    "ensemble"    log of the mean probability: averaged first, calibrated then              (4)
    "logit_mean"  the mean of the members' log-probabilities, that is, of their logits      (5)
    "members"     each member alone, with a map of its own; the mean of what comes out      (6)

(4) is the default: an average of calibrated members is under-confident (Rahaman, Thiery, "Uncertainty quantification
and deep ensembles", NeurIPS 2021, arXiv 2007.08792). In (5) a member's normaliser is a constant that the softmax takes
away.

(1) to (3): Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, arXiv 1706.04599, there
of logits. Of log-probabilities, (3) is the Dirichlet calibration of Kull et al., NeurIPS 2019, arXiv 1910.12656, and
needs no logits. Differs: (2) and (3) are drawn to the identity by a small penalty, without which they have no minimum
where every label is the most probable class, and overfit where classes are many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, ensemble_log_probs, member_log_probs
from enfold.metrics.predictions import Predictions
from enfold.metrics.temperature import fit_temperature, same_examples

FitOn = Literal["ensemble", "members", "logit_mean"]
FLOOR = -100.0  # of log-probabilities in (2) and (3): 0 times minus infinity is no number
STEPS = 500  # of L-BFGS; convex, some 30 are usual


@dataclass(frozen=True)
class Calibrated:
    """A fitted calibrator: call it with predictions on examples other than those it was fitted on."""

    weight: Tensor  # (1 or M, C, C): W of (3), diagonal in (1) and (2)
    bias: Tensor  # (1 or M, C)
    fit_on: FitOn
    validation: Predictions = field(repr=False)

    def __call__(self, p: Predictions) -> Predictions:
        """Calibrated predictions: M = 1, with "members" those of each member, whose mean is the answer."""
        if same_examples(p, self.validation):
            raise EnfoldError(
                "a calibrator must be judged by other examples than it was fitted on, got the very predictions it was "
                "fitted on: fit it on validation data, then call it with the test predictions"
            )
        return self.apply(p)

    def apply(self, p: Predictions) -> Predictions:
        """The map alone, also on the examples it was fitted on, for instance to see how well it fits."""
        if p.log_probs.shape[::2] != self.validation.log_probs.shape[::2]:
            raise EnfoldError(
                "a calibrator takes predictions of the members and classes it was fitted on, got the shapes "
                f"{tuple(self.validation.log_probs.shape)} and {tuple(p.log_probs.shape)}: fit one for these"
            )
        mapped = [
            _mapped(one, weight, bias)
            for one, weight, bias in zip(_answers(p, self.fit_on), self.weight, self.bias, strict=True)
        ]
        return Predictions.from_logits(torch.stack(mapped), p.labels.cpu())


@dataclass(frozen=True)
class TemperatureScaler:
    """Equation (1): one number, which changes how sure the answers are and never which class comes first."""

    fit_on: FitOn = "ensemble"

    def fit(self, validation: Predictions) -> Calibrated:
        """The temperature with the least NLL on these predictions."""
        labels = class_labels(validation)
        maps = []
        for one in _answers(validation, self.fit_on):
            found = fit_temperature(Predictions(one[None], labels))
            maps.append(torch.eye(validation.num_classes, dtype=torch.float64) / found)
        weight = torch.stack(maps)
        return Calibrated(weight, torch.zeros(weight.shape[:2], dtype=torch.float64), self.fit_on, validation)


@dataclass(frozen=True)
class VectorScaler:
    """Equation (2): a scale and an offset a class."""

    fit_on: FitOn = "ensemble"
    penalty: float = 1e-4  # of the squared distance to the identity, added to the NLL

    diagonal: ClassVar[bool] = True

    def fit(self, validation: Predictions) -> Calibrated:
        """The map with the least NLL, plus the penalty, on these predictions."""
        if not self.penalty >= 0:
            raise EnfoldError(f"a penalty must not be negative, got {self.penalty}: 1e-4 is usual")
        labels = class_labels(validation)
        maps = [_fitted(one, labels, self.penalty, self.diagonal) for one in _answers(validation, self.fit_on)]
        weight, bias = (torch.stack(each) for each in zip(*maps, strict=True))
        return Calibrated(weight, bias, self.fit_on, validation)


@dataclass(frozen=True)
class MatrixScaler(VectorScaler):
    """Equation (3): C² + C numbers, for many validation examples and few classes."""

    diagonal: ClassVar[bool] = False


def _answers(p: Predictions, fit_on: FitOn) -> Tensor:
    """What is mapped: (1, N, C), with "members" (M, N, C)."""
    if fit_on not in get_args(FitOn):
        raise EnfoldError(f"fit_on must be one of {get_args(FitOn)}, got {fit_on!r}: choose one")
    if fit_on == "members":
        return member_log_probs(p)  # (6)
    if fit_on == "logit_mean":
        return member_log_probs(p).clamp(min=FLOOR).mean(0, keepdim=True).log_softmax(-1)  # (5)
    return ensemble_log_probs(p)[None]  # (4)


def _mapped(log_probs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W log p + b: (N, C) -> (N, C)."""
    return log_probs.clamp(min=FLOOR) @ weight.T + bias  # (1), (2), (3)


def _fitted(log_probs: Tensor, labels: Tensor, penalty: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    """W (C, C) and b (C,), by L-BFGS from the identity."""
    log_probs = log_probs.clone()  # an ordinary tensor also if it was made in inference mode
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
        nll = torch.nn.functional.cross_entropy(_mapped(log_probs, weight(), bias), labels)
        value = nll + penalty * (free.square().sum() + bias.square().sum())
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    return weight().detach(), bias.detach()
