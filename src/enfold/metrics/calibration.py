"""Calibration: does a confidence of 0.8 mean that 80 % are right?

Bins are (lo, hi] and the first one also holds 0: every confidence, 1.0 included, falls into exactly one bin.

``scheme="width"``: edges at b / bins. A confidence up to 1e-6 above an edge counts as lying on it, because a
probability that has been through a float32 log-softmax comes back with an error of that size.
``scheme="mass"``: inner edges are the confidences of rank ceil(N b / bins), so that bins hold equally many
examples. Equal confidences share a bin, the lower one, and the figure does not depend on the order of the
examples; with many ties, or fewer examples than bins, some bins stay empty.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import class_labels, ensemble_log_probs
from enfold.metrics.predictions import Predictions

Scheme = Literal["width", "mass"]

_EDGE = 1e-6  # how far above an edge still counts as on it
FEWEST, USUAL = 100, 15  # fewer examples than that in so many bins make a figure of noise and bias


class FewExamplesWarning(UserWarning):
    """A calibration error of so few examples says little: its upward bias is of the size of what it measures."""


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram as numbers. An empty bin has count, accuracy and confidence 0, never NaN."""

    edges: Tensor  # (bins + 1,)
    counts: Tensor  # (bins,) int64
    accuracy: Tensor  # (bins,) fraction right among the bin's examples
    confidence: Tensor  # (bins,) mean confidence of the bin's examples

    @property
    def gap(self) -> Tensor:
        """Confidence minus accuracy of each bin (bins,): positive where too sure, 0 in empty bins."""
        return self.confidence - self.accuracy

    @property
    def weights(self) -> Tensor:
        """The fraction of the examples in each bin (bins,)."""
        return self.counts.double() / self.counts.sum()


def reliability(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> Reliability:
    """The ensemble's accuracy and mean confidence in bins of its confidence, the largest mean probability."""
    log_confidence, predicted = ensemble_log_probs(p).max(-1)
    correct = predicted == class_labels(p)
    edges, counts, accuracy, mean = _binned(log_confidence.exp()[None], correct[None], None, bins, scheme)
    return Reliability(edges[0], counts[0], accuracy[0], mean[0])


def ece(p: Predictions, bins: int = 15) -> float:
    """Expected calibration error Σ_b (n_b / N) |accuracy_b - confidence_b|, bins of equal width, (lo, hi]."""
    return _expected_gap(reliability(p, bins))


def adaptive_ece(p: Predictions, bins: int = 15) -> float:
    """Expected calibration error over bins of equal mass; equal confidences share a bin."""
    return _expected_gap(reliability(p, bins, "mass"))


def mce(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> float:
    """Maximum calibration error, max_b |accuracy_b - confidence_b| over the bins that hold an example."""
    return reliability(p, bins, scheme).gap.abs().max().item()


def debiased_ece(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> float:
    """ECE less its own upward bias, which a finite sample gives even to a calibrated network; never below 0.

    Kumar, Liang, Ma, "Verified uncertainty calibration", NeurIPS 2019, arXiv 1909.10155: with the accuracy of
    a bin drawn from a normal around the one seen, of variance a (1 - a) / n, the bias is the mean ECE of such
    draws minus the ECE. The mean of |normal| is taken in closed form where the paper samples.
    """
    r = reliability(p, bins, scheme)
    gap = r.gap.abs()
    spread = (r.accuracy * (1 - r.accuracy) / r.counts.clamp(min=1)).sqrt()
    ratio = torch.where(spread > 0, gap / spread, torch.inf)
    drawn = spread * math.sqrt(2 / math.pi) * (-ratio.square() / 2).exp() + gap * (ratio / math.sqrt(2)).erf()
    return max(0.0, (r.weights * (2 * gap - drawn)).sum().item())


def classwise_ece(p: Predictions, bins: int = 15, scheme: Scheme = "width", threshold: float | None = None) -> float:
    """Static calibration error (SCE): the ECE of each class's probability against its frequency, mean over C.

    With bins of equal mass it is `ace`. A threshold leaves out probabilities up to it, class by class: gaps
    are weighted by the examples that remain, and a class of which none remain counts 0.
    """
    probs, labels = ensemble_log_probs(p).exp().T.contiguous(), class_labels(p)  # (C, N), (N,)
    kept = None if threshold is None else probs > threshold
    _, counts, accuracy, confidence = _binned(probs, labels == torch.arange(p.num_classes)[:, None], kept, bins, scheme)
    weights = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return (weights * (accuracy - confidence).abs()).sum(-1).mean().item()


def ace(p: Predictions, bins: int = 15) -> float:
    """Adaptive calibration error: class-wise, bins of equal mass (Nixon et al., 2019, arXiv 1904.01685)."""
    return classwise_ece(p, bins, "mass")


def tace(p: Predictions, bins: int = 15, threshold: float = 1e-3) -> float:
    """Thresholded adaptive calibration error: `ace` of the probabilities above the threshold."""
    return classwise_ece(p, bins, "mass", threshold)


def _expected_gap(r: Reliability) -> float:
    return (r.weights * r.gap.abs()).sum().item()


def _binned(
    confidence: Tensor, hits: Tensor, kept: Tensor | None, bins: int, scheme: Scheme
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Edges (K, bins + 1), counts, hit rates, mean confidences (K, bins) of K rows of confidences (K, N)."""
    if bins < 1:
        raise EnfoldError(f"the number of bins must be at least 1, got {bins}: 15 is usual")
    if scheme not in get_args(Scheme):
        raise EnfoldError(f"a scheme of bins must be one of {get_args(Scheme)}, got {scheme!r}: choose one")
    _warn_of_few(confidence.shape[1], bins)
    kept = torch.ones_like(hits) if kept is None else kept
    rows = len(confidence)
    inner = _inner_edges(confidence, kept, bins, scheme)  # (K, bins - 1)
    slack = _EDGE if scheme == "width" else 0.0
    index = torch.searchsorted(inner + slack, confidence)  # bin b holds inner[b-1] < confidence <= inner[b]
    index = (index + bins * torch.arange(rows)[:, None])[kept]

    def total(values: Tensor) -> Tensor:
        weights = values.double()[kept]
        return torch.bincount(index, weights=weights, minlength=rows * bins).view(rows, bins)

    counts = torch.bincount(index, minlength=rows * bins).view(rows, bins)
    filled = counts.clamp(min=1)
    edges = torch.cat([torch.zeros(rows, 1).double(), inner, torch.ones(rows, 1).double()], dim=1)
    return edges, counts, total(hits) / filled, total(confidence) / filled


def _warn_of_few(examples: int, bins: int) -> None:
    if examples * USUAL < FEWEST * bins:
        warnings.warn(
            f"a calibration error in {bins} bins needs at least {-(-FEWEST * bins // USUAL)} examples to mean much, "
            f"got {examples}: judge by more, or take fewer bins",
            FewExamplesWarning,
            stacklevel=4,
        )


def _inner_edges(confidence: Tensor, kept: Tensor, bins: int, scheme: Scheme) -> Tensor:
    steps = torch.arange(1, bins)
    if scheme == "width":
        return (steps.double() / bins).expand(len(confidence), -1).contiguous()
    ordered = torch.where(kept, confidence, 1.0).sort(dim=1).values  # left out: behind every rank used
    sizes = kept.sum(1, keepdim=True)  # (K, 1)
    ranks = (sizes * steps + bins - 1) // bins - 1  # ceil(size b / bins), counted from 0
    return ordered.gather(1, ranks.clamp(min=0))
