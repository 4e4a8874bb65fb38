"""Bands: between which accuracies a bin of a reliability diagram would lie with other test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.bootstrap import draw_counts
from enfold.metrics.calibration import _EDGE, Reliability, Scheme, reliability
from enfold.metrics.distributions import class_labels, ensemble_log_probs
from enfold.metrics.predictions import Predictions

_ENTRIES_AT_ONCE = 2_000_000  # of counts in float64


@dataclass(frozen=True)
class ReliabilityBand:
    """A reliability diagram with an interval of each bin's accuracy; an empty bin has 0 for both ends."""

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
    """The diagram with the percentile interval of each bin's accuracy over resamples of the examples.

    The bins do not move with the draw. A replicate that leaves a bin empty says nothing about it. It is the noise of a
    finite test set only; what another seed of the training would give is not in it.
    """
    if not 0 < level < 1:
        raise EnfoldError(f"a level must lie between 0 and 1, got {level}: 0.95 is usual")
    diagram = reliability(p, bins, scheme)
    log_confidence, predicted = ensemble_log_probs(p).max(-1)
    edges = diagram.edges[1:-1] + (_EDGE if scheme == "width" else 0.0)
    held = torch.nn.functional.one_hot(torch.searchsorted(edges, log_confidence.exp()), bins).double()  # (N, bins)
    features = torch.cat([held, held * (predicted == class_labels(p)).double()[:, None]], dim=1)
    counts = draw_counts(len(p), replicates, seed)
    blocks = counts.split(max(1, _ENTRIES_AT_ONCE // len(p)))
    sizes, right = torch.cat([block.double() @ features for block in blocks]).split(bins, dim=1)  # (R, bins) each
    tail = (1 - level) / 2
    ends = (right / sizes).nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)  # 0 / 0 is left out
    lower, upper = ends.nan_to_num(nan=0.0)
    return ReliabilityBand(diagram, lower, upper, level)
