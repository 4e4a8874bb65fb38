"""Confidence bands of reliability diagrams, by the bootstrap over test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.bootstrap import draw_counts
from enfold.metrics.calibration import _EDGE, Reliability, Scheme, reliability
from enfold.metrics.distributions import class_labels, ensemble_log_probs
from enfold.metrics.predictions import Predictions

_ENTRIES_AT_ONCE = 2_000_000  # counts in float64 per block


@dataclass(frozen=True)
class ReliabilityBand:
    """A reliability diagram with a confidence interval of each bin's accuracy; both ends are 0 for an empty bin.

    Args:
        diagram: The reliability diagram.
        lower: Lower end for each bin.
        upper: Upper end for each bin.
        level: Probability of the intervals.
    """

    diagram: Reliability
    lower: Tensor  # (bins,)
    upper: Tensor  # (bins,)
    level: float


def reliability_band(
    p: Predictions,
    bins: int = 15,
    scheme: Scheme = "width",
    *,
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> ReliabilityBand:
    """Return the reliability diagram with a percentile interval of each bin's accuracy.

    The bin edges are the same in all replicates, and replicates in which a bin is empty are ignored for that bin. The
    interval covers the noise of a finite test set, not the variation between training seeds.

    Args:
        p: Predictions of the ensemble.
        bins: Number of bins.
        scheme: Bins of equal "width" or of equal "mass".
        replicates: Number of bootstrap replicates.
        level: Confidence level of the interval.
        seed: Seed of the bootstrap.

    Returns:
        The diagram with the lower and upper end of each bin's interval.

    Raises:
        EnfoldError: If `level`, `bins` or `scheme` is invalid.
    """
    if not 0 < level < 1:
        raise EnfoldError(f"level must be between 0 and 1, got {level}: use for example level=0.95")
    diagram = reliability(p, bins, scheme)
    log_confidence, predicted = ensemble_log_probs(p).max(-1)
    edges = diagram.edges[1:-1] + (_EDGE if scheme == "width" else 0.0)
    in_bin = torch.nn.functional.one_hot(torch.searchsorted(edges, log_confidence.exp()), bins).double()  # (N, bins)
    features = torch.cat([in_bin, in_bin * (predicted == class_labels(p)).double()[:, None]], dim=1)
    counts = draw_counts(len(p), replicates, seed)
    blocks = counts.split(max(1, _ENTRIES_AT_ONCE // len(p)))
    sizes, right = torch.cat([block.double() @ features for block in blocks]).split(bins, dim=1)  # (R, bins) each
    tail = (1 - level) / 2
    ends = (right / sizes).nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)  # 0 / 0 is ignored
    lower, upper = ends.nan_to_num(nan=0.0)
    return ReliabilityBand(diagram, lower, upper, level)
