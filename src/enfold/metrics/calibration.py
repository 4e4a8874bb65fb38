"""Calibration errors and reliability diagrams.

Bins are (lo, hi], and the first one includes 0, so that every confidence falls into exactly one bin.

``scheme="width"``: edges at b / bins. A confidence up to 1e-6 above an edge counts as equal to it, because
probabilities from a float32 log-softmax have errors of that size.
``scheme="mass"``: inner edges are the confidences of rank ceil(N b / bins), so that bins contain equally many
examples. Equal confidences fall into the same (lower) bin, so that the result does not depend on the order of the
examples; with many ties, or fewer examples than bins, some bins are empty.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import AT_ONCE, by_blocks, class_labels, ensemble_log_probs
from enfold.metrics.predictions import Predictions, mean_log_probs

Scheme = Literal["width", "mass"]

_EDGE = 1e-6  # tolerance above an edge
FEWEST, USUAL = 100, 15  # with fewer than 100 examples in 15 bins, noise and bias dominate


class FewExamplesWarning(UserWarning):
    """There are too few examples for a calibration error: its bias is as large as the error itself."""


@dataclass(frozen=True)
class Reliability:
    """The numbers of a reliability diagram. Count, accuracy and confidence of an empty bin are 0.

    Args:
        edges: Ends of the bins, (bins + 1,).
        counts: Examples of each bin.
        accuracy: Accuracy of each bin.
        confidence: Mean confidence of each bin.
    """

    edges: Tensor  # (bins + 1,)
    counts: Tensor  # (bins,) int64
    accuracy: Tensor  # (bins,) fraction of correct predictions in the bin
    confidence: Tensor  # (bins,) mean confidence of the bin's examples

    @property
    def gap(self) -> Tensor:
        """Confidence minus accuracy of each bin (bins,): positive for overconfidence, 0 for empty bins."""
        return self.confidence - self.accuracy

    @property
    def weights(self) -> Tensor:
        """The fraction of the examples in each bin (bins,)."""
        return self.counts.double() / self.counts.sum()


def reliability(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> Reliability:
    """Return the ensemble's accuracy and mean confidence in bins of its confidence, the largest mean probability.

    Args:
        p: Predictions of the ensemble.
        bins: Number of bins.
        scheme: Bins of equal "width" or of equal "mass".

    Raises:
        EnfoldError: If `bins` is below 1 or `scheme` is unknown.
    """

    def confidence(members: Tensor, labels: Tensor) -> Tensor:
        log_confidence, predicted = mean_log_probs(members, p.weights).max(-1)
        return torch.stack([log_confidence.exp(), (predicted == labels).double()], dim=-1)

    found, correct = by_blocks(p, confidence).T.contiguous()
    edges, counts, accuracy, mean = _bin_statistics(found[None], correct[None] == 1, None, bins, scheme)
    return Reliability(edges[0], counts[0], accuracy[0], mean[0])


def ece(p: Predictions, bins: int = 15) -> float:
    """Return the expected calibration error Σ_b (n_b / N) |accuracy_b - confidence_b| over bins of equal width.

    Args:
        p: Predictions of the members.
        bins: Number of bins.
    """
    return _expected_gap(reliability(p, bins))


def adaptive_ece(p: Predictions, bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal mass.

    Args:
        p: Predictions of the members.
        bins: Number of bins.
    """
    return _expected_gap(reliability(p, bins, "mass"))


def mce(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> float:
    """Return the maximum calibration error, max_b |accuracy_b - confidence_b| over the non-empty bins.

    Args:
        p: Predictions of the members.
        bins: Number of bins.
        scheme: "width" for bins of equal width, "mass" for bins of equal mass.
    """
    return reliability(p, bins, scheme).gap.abs().max().item()


def debiased_ece(p: Predictions, bins: int = 15, scheme: Scheme = "width") -> float:
    """Return the ECE minus an estimate of its bias, which is positive even for calibrated networks; at least 0.

    Kumar, Liang, Ma, "Verified uncertainty calibration", NeurIPS 2019, arXiv 1909.10155: with the accuracy of a bin
    drawn from a normal distribution around the observed one, with variance a (1 - a) / n, the bias is the mean ECE of
    such draws minus the ECE. Differs from the paper: the mean of |normal| is computed in closed form, not sampled.

    Args:
        p: Predictions of the members.
        bins: Number of bins.
        scheme: "width" for bins of equal width, "mass" for bins of equal mass.
    """
    r = reliability(p, bins, scheme)
    gap = r.gap.abs()
    spread = (r.accuracy * (1 - r.accuracy) / r.counts.clamp(min=1)).sqrt()
    ratio = torch.where(spread > 0, gap / spread, torch.inf)
    drawn = spread * math.sqrt(2 / math.pi) * (-ratio.square() / 2).exp() + gap * (ratio / math.sqrt(2)).erf()
    return max(0.0, (r.weights * (2 * gap - drawn)).sum().item())


def classwise_ece(p: Predictions, bins: int = 15, scheme: Scheme = "width", threshold: float | None = None) -> float:
    """Return the static calibration error (SCE): the ECE of each class's probability, mean over classes.

    Args:
        p: Predictions of the ensemble.
        bins: Number of bins.
        scheme: Bins of equal "width" or of equal "mass" (`ace`).
        threshold: Ignore probabilities up to this value in each class; a class without any left counts as 0.

    Raises:
        EnfoldError: If `bins` is below 1 or `scheme` is unknown.
    """
    log_probs, labels = ensemble_log_probs(p), class_labels(p)  # (N, C), (N,)
    errors = []
    for classes in torch.arange(p.num_classes).split(max(1, AT_ONCE // len(p))):
        probs = log_probs[:, classes].exp().T.contiguous()  # (classes, N)
        mask = None if threshold is None else probs > threshold
        hits = labels == classes[:, None]
        _, counts, accuracy, confidence = _bin_statistics(probs, hits, mask, bins, scheme)
        weights = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
        errors.append((weights * (accuracy - confidence).abs()).sum(-1))
    return torch.cat(errors).mean().item()


def ace(p: Predictions, bins: int = 15) -> float:
    """Return the adaptive calibration error: class-wise, bins of equal mass (Nixon et al., 2019, arXiv 1904.01685).

    Args:
        p: Predictions of the members.
        bins: Number of bins.
    """
    return classwise_ece(p, bins, "mass")


def tace(p: Predictions, bins: int = 15, threshold: float = 1e-3) -> float:
    """Return the thresholded adaptive calibration error: `ace` of the probabilities above the threshold.

    Args:
        p: Predictions of the members.
        bins: Number of bins.
        threshold: Probabilities up to it are left out.
    """
    return classwise_ece(p, bins, "mass", threshold)


def _expected_gap(r: Reliability) -> float:
    return (r.weights * r.gap.abs()).sum().item()


def _bin_statistics(
    confidence: Tensor, hits: Tensor, mask: Tensor | None, bins: int, scheme: Scheme
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return edges (K, bins + 1), counts, hit rates and mean confidences (K, bins) of K rows of confidences (K, N)."""
    if bins < 1:
        raise EnfoldError(f"bins must be at least 1, got {bins}: use for example bins=15")
    if scheme not in get_args(Scheme):
        raise EnfoldError(f"scheme must be one of {get_args(Scheme)}, got {scheme!r}: choose one of these")
    _warn_if_few(confidence.shape[1], bins)
    mask = torch.ones_like(hits) if mask is None else mask
    rows = len(confidence)
    inner = _inner_edges(confidence, mask, bins, scheme)  # (K, bins - 1)
    slack = _EDGE if scheme == "width" else 0.0
    index = torch.searchsorted(inner + slack, confidence)  # bin b: inner[b-1] < confidence <= inner[b]
    index = (index + bins * torch.arange(rows)[:, None])[mask]

    def total(values: Tensor) -> Tensor:
        weights = values.double()[mask]
        return torch.bincount(index, weights=weights, minlength=rows * bins).view(rows, bins)

    counts = torch.bincount(index, minlength=rows * bins).view(rows, bins)
    filled = counts.clamp(min=1)
    edges = torch.cat([torch.zeros(rows, 1).double(), inner, torch.ones(rows, 1).double()], dim=1)
    return edges, counts, total(hits) / filled, total(confidence) / filled


def _warn_if_few(examples: int, bins: int) -> None:
    if examples * USUAL < FEWEST * bins:
        warnings.warn(
            f"a calibration error with bins={bins} needs at least {-(-FEWEST * bins // USUAL)} examples, got "
            f"{examples}: evaluate on more examples or use fewer bins",
            FewExamplesWarning,
            stacklevel=4,
        )


def _inner_edges(confidence: Tensor, mask: Tensor, bins: int, scheme: Scheme) -> Tensor:
    steps = torch.arange(1, bins)
    if scheme == "width":
        return (steps.double() / bins).expand(len(confidence), -1).contiguous()
    ordered = torch.where(mask, confidence, 1.0).sort(dim=1).values  # masked values are last
    sizes = mask.sum(1, keepdim=True)  # (K, 1)
    ranks = (sizes * steps + bins - 1) // bins - 1  # ceil(size b / bins), counted from 0
    return ordered.gather(1, ranks.clamp(min=0))
