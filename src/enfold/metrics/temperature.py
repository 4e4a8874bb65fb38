"""One temperature after averaging, softmax(log p̄ / T), fitted on validation data.

Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, arXiv 1706.04599. Members
are averaged first and tempered then: an average of calibrated members is under-confident (Rahaman, Thiery,
"Uncertainty quantification and deep ensembles", NeurIPS 2021, arXiv 2007.08792).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, ensemble_log_probs, expected, of_label
from enfold.metrics.predictions import Predictions

COLDEST, HOTTEST = 1e-6, 1e6  # the temperatures searched
_TIE = 1e-6  # log-probabilities this close are equal up to the rounding of float32


def fit_temperature(validation: Predictions) -> float:
    """The temperature T with the least NLL of softmax(log p̄ / T) on these predictions.

    In 1 / T the NLL is convex and its slope is E_T[log p̄] - log p̄(y), so the root of the slope, sought over
    log T, is the minimum. There is none where every label is the most probable class or tied for it, uniform
    predictions among them: ever colder is ever better, or as good, on these examples, which says nothing about
    others, and T = 1 is returned. Predictions worse than a uniform guess get the hottest temperature.
    """
    log_probs = ensemble_log_probs(validation)  # (N, C)
    own = of_label(log_probs, class_labels(validation))  # (N,)
    if own.isinf().any():
        raise EnfoldError(
            f"a temperature cannot mend labels of probability 0, got {int(own.isinf().sum())} of them in "
            "the validation data: smooth the predictions or look for wrong labels"
        )
    if bool((own >= log_probs.max(-1).values - _TIE).all()):
        return 1.0

    def slope(log_temperature: float) -> float:
        scaled = (log_probs * math.exp(-log_temperature)).log_softmax(-1)
        return (expected(scaled.exp(), log_probs) - own).mean().item()

    return _root(slope, math.log(COLDEST), math.log(HOTTEST))


def tempered(p: Predictions, temperature: float) -> Predictions:
    """The ensemble at a temperature, softmax(log p̄ / T): averaged first, so M = 1; float64 on the CPU."""
    if not 0 < temperature < math.inf:
        raise EnfoldError(f"a temperature must be positive and finite, got {temperature}: 1 changes nothing")
    return Predictions.from_logits(ensemble_log_probs(p) / temperature, p.labels.cpu())


def calibrated(metric: Callable[[Predictions], float], test: Predictions, validation: Predictions) -> float:
    """A metric of the test predictions at the temperature fitted on the validation predictions.

    With `nll`, `ece` and `brier` these are the calibrated cNLL, cECE and cBrier (c is not "corrupted" here).
    """
    if test.log_probs.shape[::2] != validation.log_probs.shape[::2]:
        raise EnfoldError(
            "validation and test predictions must be of the same members and classes, got the shapes "
            f"{tuple(validation.log_probs.shape)} and {tuple(test.log_probs.shape)}: one ensemble makes both"
        )
    if same_examples(test, validation):
        raise EnfoldError(
            "the temperature must be fitted on other examples than it is judged by, got validation "
            "predictions that are test predictions: pass the predictions on held-out validation data"
        )
    return metric(tempered(test, fit_temperature(validation)))


def _root(slope: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # here, as importing it takes half a second

    if slope(low) <= 0:  # still improving at the coldest
        return math.exp(low)
    if slope(high) >= 0:
        return math.exp(high)
    return math.exp(float(brentq(slope, low, high, xtol=1e-12)))


def same_examples(a: Predictions, b: Predictions) -> bool:
    """Whether two predictions are equal or share an example's memory, as disjoint slices do not."""
    shared = _overlap(a.labels, b.labels, axis=0) or _overlap(a.log_probs, b.log_probs, axis=1)
    return shared or (torch.equal(a.labels.cpu(), b.labels.cpu()) and _equal(a.log_probs, b.log_probs))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64))


def _overlap(a: Tensor, b: Tensor, axis: int) -> bool:
    """Whether an example begins at the same address in both; `axis` is the axis of the examples."""
    if a.device != b.device:
        return False
    first, second = (t.data_ptr() + t.element_size() * t.stride(axis) * torch.arange(t.shape[axis]) for t in (a, b))
    return bool(torch.isin(first, second).any())
