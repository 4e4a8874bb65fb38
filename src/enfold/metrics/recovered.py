"""The fraction of an ensemble's gain that a single network recovers, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import require_members
from enfold.metrics.predictions import RowPredictions
from enfold.metrics.scores import example_correct, per_member
from enfold.seeds import generator

_DRAWS_AT_ONCE = 2_000_000  # limits the memory of the bootstrap to about 30 MB


def gain_recovered(
    one: float,
    mean_member: float,
    ensemble: float,
    *,
    higher_is_better: bool,
    interval: tuple[float, float] | None = None,
) -> float:
    """Return (one - mean_member) / (ensemble - mean_member): 0 is as good as a member, 1 as the ensemble.

    Args:
        one: Metric of the single network.
        mean_member: Mean metric of the members.
        ensemble: Metric of the ensemble.
        higher_is_better: Whether higher values of the metric are better.
        interval: Confidence interval of the gain, from `gain_interval`.

    Returns:
        The ratio; NaN if there is no gain to recover: the ensemble is no better than its mean member, a value is not
        finite, or the interval contains 0.
    """
    gain = ensemble - mean_member
    improved = gain if higher_is_better else -gain
    if not all(map(math.isfinite, (one, mean_member, ensemble))) or improved <= 0:
        return math.nan
    if interval is not None and not beyond_noise(interval):
        return math.nan
    return (one - mean_member) / gain


def beyond_noise(interval: tuple[float, float]) -> bool:
    """Return whether the interval of a difference excludes 0.

    Args:
        interval: Lower and upper end.
    """
    low, high = interval
    return low > 0 or high < 0


def gain_interval(
    p: RowPredictions,
    score: Callable[[Any], Tensor] = example_correct,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the bootstrap interval of the ensemble's score minus its mean member's.

    Args:
        p: Predictions of the ensemble.
        score: Function that returns a score of each example, by default correctness (accuracy).
        samples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Raises:
        EnfoldError: If there is only one member.
    """
    require_members(p, "gain_interval")
    return paired_bootstrap(score(p), per_member(score, p).mean(0), samples=samples, seed=seed)


def paired_bootstrap(
    a_per_example: Tensor, b_per_example: Tensor, samples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile interval of mean(a) - mean(b) over paired resamples of the examples.

    It covers the noise of a finite test set, not the variation between training seeds.

    Args:
        a_per_example: Scores (N,) of the first model.
        b_per_example: Scores (N,) of the second model for the same examples.
        samples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        level: Confidence level of the interval.

    Raises:
        EnfoldError: If the scores do not correspond or are not finite, or an argument is out of range.
    """
    difference = _difference(a_per_example, b_per_example)
    if samples < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"samples must be at least 1 and level between 0 and 1, got samples={samples} and level={level}: "
            "use for example samples=1000 and level=0.95"
        )
    N = len(difference)
    rng = generator(seed, "bootstrap")
    means = []
    for start in range(0, samples, max(1, _DRAWS_AT_ONCE // N)):
        rows = min(samples - start, max(1, _DRAWS_AT_ONCE // N))
        means.append(difference[torch.randint(N, (rows, N), generator=rng)].mean(1))
    tail = (1 - level) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def _difference(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim != 1 or a.shape != b.shape or len(a) == 0:
        raise EnfoldError(
            f"a_per_example and b_per_example must be scores of the same examples, got shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}: pass two non-empty tensors of shape (N,)"
        )
    difference = a.detach().to("cpu", torch.float64) - b.detach().to("cpu", torch.float64)
    if not difference.isfinite().all():
        raise EnfoldError(
            f"a_per_example and b_per_example must be finite, got {int((~difference.isfinite()).sum())} infinite or "
            "NaN values: an infinite NLL comes from a label of probability 0"
        )
    return difference
