"""Temperature scaling of the mean probabilities, softmax(log p̄ / T), fitted on validation data.

Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, arXiv 1706.04599. The temperature
is applied after averaging, as an average of calibrated members is under-confident (Rahaman, Thiery, "Uncertainty
quantification and deep ensembles", NeurIPS 2021, arXiv 2007.08792).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, ensemble_log_probs, expectation, of_label
from enfold.metrics.predictions import Predictions

P = TypeVar("P", bound=Predictions)
COLDEST, HOTTEST = 1e-6, 1e6  # the range of the search
_TIE = 1e-6  # tolerance for equal log-probabilities: rounding errors of float32


def fit_temperature(validation: Predictions) -> float:
    """Return the temperature T that minimizes the NLL of softmax(log p̄ / T).

    The NLL is convex in 1 / T with slope E_T[log p̄] - log p̄(y); its minimum is the root of the slope, searched over
    log T. If every label is the most probable class (ties included), there is no minimum and T = 1 is returned.
    Predictions worse than uniform ones get the highest temperature of the search.

    Args:
        validation: Predictions on validation data.

    Raises:
        EnfoldError: If a label has probability 0.
    """
    known = validation.known()
    log_probs = ensemble_log_probs(known)  # (N, C)
    own = of_label(log_probs, class_labels(known))  # (N,)
    if own.isinf().any():
        raise EnfoldError(
            f"validation must have no labels of probability 0, got {int(own.isinf().sum())} of them: "
            "smooth the predictions or check the labels"
        )
    if bool((own >= log_probs.max(-1).values - _TIE).all()):
        return 1.0

    def slope(log_temperature: float) -> float:
        scaled = (log_probs * math.exp(-log_temperature)).log_softmax(-1)
        return (expectation(scaled.exp(), log_probs) - own).mean().item()

    return _root(slope, math.log(COLDEST), math.log(HOTTEST))


def apply_temperature(p: P, temperature: float) -> P:
    """Return the predictions softmax(log p̄ / T) of the ensemble (M = 1), in float64 on the CPU.

    Args:
        p: Predictions of the members.
        temperature: T, positive.

    Raises:
        EnfoldError: If `temperature` is not positive and finite.
    """
    if not 0 < temperature < math.inf:
        raise EnfoldError(f"temperature must be positive and finite, got {temperature}: use 1 for no change")
    log_probs = torch.log_softmax((ensemble_log_probs(p) / temperature)[None], dim=-1)
    return replace(p, log_probs=log_probs, labels=p.labels.cpu(), weights=None)


def evaluate_calibrated(metric: Callable[[P], float], test: P, validation: P) -> float:
    """Return a metric of the test predictions at the temperature fitted on the validation predictions.

    With `nll`, `ece` and `brier` these are the calibrated cNLL, cECE and cBrier.

    Args:
        metric: The metric.
        test: Predictions on test data.
        validation: Predictions of the same members on other examples.

    Raises:
        EnfoldError: If the predictions have different members or classes, or are of the same examples.
    """
    require_other_examples(test, validation)
    return metric(apply_temperature(test, fit_temperature(validation)))


def require_other_examples(test: Predictions, validation: Predictions) -> None:
    """Check that two predictions are those of the same members for other examples.

    Args:
        test: Predictions on test data.
        validation: Predictions on validation data.

    Raises:
        EnfoldError: If the predictions have different members or classes, or are of the same examples.
    """
    if test.log_probs.shape[::2] != validation.log_probs.shape[::2]:
        raise EnfoldError(
            "test and validation must be predictions of the same members and classes, got log_probs of shape "
            f"{tuple(test.log_probs.shape)} and {tuple(validation.log_probs.shape)}: use the same ensemble for both"
        )
    if has_same_examples(test, validation):
        raise EnfoldError(
            "validation must contain other examples than test, got the same predictions: pass predictions on held-out "
            "validation data"
        )


def _root(slope: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # imported here: it takes half a second

    if slope(low) <= 0:  # still improving at the coldest
        return math.exp(low)
    if slope(high) >= 0:
        return math.exp(high)
    return math.exp(float(brentq(slope, low, high, xtol=1e-12)))


def has_same_examples(a: Predictions, b: Predictions) -> bool:
    """Return whether two predictions are equal or have memory of an example in common."""
    overlap = _has_overlap(a.labels, b.labels, axis=0) or _has_overlap(a.log_probs, b.log_probs, axis=1)
    return overlap or (torch.equal(a.labels.cpu(), b.labels.cpu()) and _is_equal(a.log_probs, b.log_probs))


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64))


def _has_overlap(a: Tensor, b: Tensor, axis: int) -> bool:
    """Return whether an example starts at the same address in both; `axis` is the axis of the examples."""
    if a.device != b.device:
        return False
    first, second = (t.data_ptr() + t.element_size() * t.stride(axis) * torch.arange(t.shape[axis]) for t in (a, b))
    return bool(torch.isin(first, second).any())
