"""Metrics of multi-label classification: L independent labels per example, some of which may be unknown.

With p̄_nl the mean probability of label l of example n, y_nl in {0, 1}, and all labels counted that are known:

    nll                -mean_nl log p̄_nl(y_nl)                                              (1)
    brier              mean_nl (p̄_nl - y_nl)², from 0 to 1                                  (2)
    ece                mean_l ECE_l, where ECE_l = Σ_b n_b/N_l |frequency - probability|    (3)
    average precision  AP_l = Σ_k (recall_k - recall_k-1) precision_k                       (4)
    F1                 2 TP / (2 TP + FP + FN) with the threshold p̄ > 1/2                   (5)

(3) compares the probability of a label with its frequency, in 15 bins of equal width. (4) has one threshold k for each
probability that occurs, as in scikit-learn; its mean over labels with at least one positive example is `map`, and
`micro_map` is (4) of all labels as one. Labels of which no prediction and no example is positive are left out of (5).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.calibration import FewExamplesWarning, _bin_statistics
from enfold.metrics.distributions import ensemble_log_probs, member_log_probs, of_label
from enfold.metrics.predictions import Predictions

UNKNOWN = -100  # the label of rows that are not scored


@dataclass(frozen=True)
class MultilabelPredictions(Predictions):
    """Log-probabilities of absent and present labels, one row per example and label.

    Args:
        log_probs: Log-probabilities (M, N L, 2), the L labels of the first example first.
        labels: 0 for absent, 1 for present, -100 for unknown, (N L,).
        num_labels: The number of labels L.
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit, a row is not normalized, or no label is known.
    """

    num_labels: int = 1

    headline: ClassVar[tuple[str, ...]] = ("map", "nll", "ece", "exact_match")
    score: ClassVar[str] = "map"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_probs.shape[2] != 2 or len(self.labels) % self.num_labels:
            raise EnfoldError(
                f"log_probs must have shape (M, N * {self.num_labels}, 2) for num_labels={self.num_labels}, got "
                f"{tuple(self.log_probs.shape)}: pass one row per example and label"
            )
        if not bool((self.labels != UNKNOWN).any()):
            raise EnfoldError("labels must contain known ones, got none: check ignore_index")

    def known(self) -> Predictions:
        """Return the rows of all known labels."""
        is_known = self.labels != UNKNOWN
        return Predictions(self.log_probs[:, is_known], self.labels[is_known], weights=self.weights)

    def select(self, index: Tensor) -> MultilabelPredictions:
        """Return the predictions with all labels unknown but those at these indices (n,)."""
        labels = torch.full_like(self.labels, UNKNOWN)
        labels[index] = self.labels[index]
        return replace(self, labels=labels)

    def uncertainty(self) -> Tensor:
        """Return the entropy of every label that is known, (N L,); NaN for unknown labels."""
        return super().uncertainty().masked_fill(self.labels == UNKNOWN, math.nan)

    def by_label(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mean probability and the target of each label (N_l,), of the examples where it is known."""
        probs = ensemble_log_probs(self)[:, 1].exp().view(-1, self.num_labels)
        labels = self.labels.cpu().view(-1, self.num_labels)
        for own, targets in zip(probs.T, labels.T, strict=True):
            is_known = targets != UNKNOWN
            yield own[is_known], targets[is_known]


def example_label_nll(p: MultilabelPredictions) -> Tensor:
    """Return -log p̄(y) of every known label."""
    known = p.known()
    return of_label(ensemble_log_probs(known), known.labels.cpu().long()).abs()


def label_nll(p: MultilabelPredictions) -> float:
    """Return the negative log-likelihood of the known labels, equation (1).

    Args:
        p: Predictions of the members.
    """
    return example_label_nll(p).mean().item()  # (1)


def gibbs_label_nll(p: MultilabelPredictions) -> float:
    """Return the mean of the members' negative log-likelihoods, which is at least `label_nll`.

    Args:
        p: Predictions of the members.
    """
    known = p.known()
    return of_label(member_log_probs(known), known.labels.cpu().long()).abs().mean().item()


def label_brier(p: MultilabelPredictions) -> float:
    """Return the squared distance of the probabilities from the labels, equation (2), from 0 to 1.

    Args:
        p: Predictions of the members.
    """
    known = p.known()
    return (ensemble_log_probs(known)[:, 1].exp() - known.labels.cpu()).square().mean().item()  # (2)


def label_ece(p: MultilabelPredictions, bins: int = 15) -> float:
    """Return the calibration error of the probability of each label, mean over labels, equation (3).

    Args:
        p: Predictions of the members.
        bins: Number of bins.
    """
    return _over_labels(p, lambda probs, labels: _ece(probs, labels, bins))  # (3)


def mean_average_precision(p: MultilabelPredictions) -> float:
    """Return the average precision (4), mean over the labels with a positive example; NaN without any.

    Args:
        p: Predictions of the members.
    """
    return _over_labels(p, average_precision)


def micro_average_precision(p: MultilabelPredictions) -> float:
    """Return the average precision (4) of all labels as one; NaN without positive examples.

    Args:
        p: Predictions of the members.
    """
    known = p.known()
    return average_precision(ensemble_log_probs(known)[:, 1].exp(), known.labels.cpu())


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the average precision of scores (N,) for labels (N,) of 0 and 1, equation (4); NaN without positives.

    Args:
        scores: Scores, (N,).
        labels: Labels, 0 or 1, (N,).
    """
    positives = int(labels.sum())
    if not positives:
        return math.nan
    order = scores.argsort(descending=True)
    ordered, hits = scores[order], labels[order].double().cumsum(0)
    last = torch.ones(len(ordered), dtype=torch.bool)  # of each run of equal scores
    last[:-1] = ordered[1:] != ordered[:-1]
    found = hits[last]
    precision = found / (1 + last.nonzero()[:, 0])
    gained = torch.diff(found, prepend=found.new_zeros(1)) / positives
    return (gained * precision).sum().item()  # (4)


def exact_match(p: MultilabelPredictions) -> float:
    """Return the fraction of examples whose known labels are all predicted correctly.

    Args:
        p: Predictions of the members.
    """
    correct = _predict_labels(p) == p.labels.cpu().view(-1, p.num_labels)
    is_known = p.labels.cpu().view(-1, p.num_labels) != UNKNOWN
    return (correct | ~is_known).all(1)[is_known.any(1)].double().mean().item()


def label_accuracy(p: MultilabelPredictions) -> float:
    """Return the fraction of known labels that are predicted correctly.

    Args:
        p: Predictions of the members.
    """
    correct = _predict_labels(p).flatten() == p.labels.cpu()
    return correct[p.labels.cpu() != UNKNOWN].double().mean().item()


def f1(p: MultilabelPredictions) -> float:
    """Return F1 (5), mean over labels.

    Args:
        p: Predictions of the members.
    """
    return _over_labels(p, _f1)


def micro_f1(p: MultilabelPredictions) -> float:
    """Return F1 (5) of all labels as one.

    Args:
        p: Predictions of the members.
    """
    known = p.known()
    return _f1(ensemble_log_probs(known)[:, 1].exp(), known.labels.cpu())


def _f1(probs: Tensor, labels: Tensor) -> float:
    predicted = (probs > 0.5).long()
    total = int(predicted.sum() + labels.sum())
    return 2 * int((predicted * labels).sum()) / total if total else math.nan  # (5)


def _predict_labels(p: MultilabelPredictions) -> Tensor:
    """Return the predicted labels (N, L)."""
    return (ensemble_log_probs(p)[:, 1].exp() > 0.5).long().view(-1, p.num_labels)


def _ece(probs: Tensor, labels: Tensor, bins: int) -> float:
    if not len(probs):
        return math.nan
    with warnings.catch_warnings():  # rare labels are expected
        warnings.simplefilter("ignore", FewExamplesWarning)
        _, counts, frequency, mean = _bin_statistics(probs[None], labels[None] == 1, None, bins, "width")
    return ((counts.double() / counts.sum()) * (frequency - mean).abs()).sum().item()


def _over_labels(p: MultilabelPredictions, metric: Callable[[Tensor, Tensor], float]) -> float:
    """Return the mean of a metric over the labels for which it is defined."""
    values = [metric(probs, labels) for probs, labels in p.by_label()]
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan
