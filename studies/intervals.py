"""Intervals of a difference between two rows, from few seeds and one test set, and their correction for many claims.

The mean over S seeds varies with the seeds and with the test examples, which all seeds share:

    se² = V_seeds + V_examples,    V_seeds = s² / S,    V_examples = variance over draws of test examples   (1)
    df  = se⁴ / (V_seeds² / (S - 1))                                                    (Welch-Satterthwaite) (2)

The interval is Student's with (2) degrees of freedom: for seeds that agree it is the normal interval of the test set,
for seeds that differ Student's interval over seeds. `python -m studies.coverage` simulates how often it contains the
truth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import bootstrap
from enfold.metrics.bootstrap import Difference
from enfold.metrics.predictions import Predictions

NORMAL = 1e9  # degrees of freedom


@dataclass(frozen=True)
class Comparison(Difference):
    """A difference with its p-value: the probability of one at least as large in either direction if there is none."""

    p: float = math.nan


def student_interval(values: Sequence[float], of_examples: float, level: float = 0.95) -> Comparison:
    """Return the mean of the differences of the seeds with the interval (1), (2).

    Args:
        values: The difference of each seed. With one, the interval is that of the test set; infinite without examples.
        of_examples: The variance of their mean over draws of test examples, 0 if the numbers have no examples.
        level: The coverage.
    """
    mean, count = statistics.fmean(values), len(values)
    of_seeds = statistics.variance(values) / count if count > 1 else 0.0
    if count == 1 and not of_examples:
        return Comparison(mean, -math.inf, math.inf, tuple(values), math.nan)
    total = of_seeds + of_examples
    if not total:  # equal in all seeds and examples
        return Comparison(mean, mean, mean, tuple(values), 1.0 if mean == 0 else 0.0)
    degrees = min(NORMAL, total**2 / (of_seeds**2 / (count - 1))) if of_seeds else NORMAL
    half = float(stdtrit(degrees, (1 + level) / 2)) * math.sqrt(total)
    p = 2 * float(stdtr(degrees, -abs(mean) / math.sqrt(total)))
    return Comparison(mean, mean - half, mean + half, tuple(values), p)


def compare(
    first: Sequence[Predictions],
    second: Sequence[Predictions],
    metric: str,
    *,
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    mean_member: tuple[bool, bool] = (False, False),
) -> Comparison:
    """Return the difference of a metric between two rows: one `Predictions` per seed, for the same test examples."""
    for one, other in zip(first, second, strict=True):
        if not (torch.equal(one.labels, other.labels) and torch.equal(one.labels, first[0].labels)):
            raise EnfoldError("rows must be predictions of the same examples, got other labels: use one test set")
    counts = bootstrap.draw_counts(len(first[0]), replicates, seed)
    values, drawn = [], torch.zeros(replicates, dtype=torch.float64)
    for one, other in zip(first, second, strict=True):
        sides = [(one, mean_member[0]), (other, mean_member[1])]
        exact = [bootstrap.metric_value(metric, each, of_mean_member=mean) for each, mean in sides]
        values.append(exact[0] - exact[1])
        drawn += _drawn(metric, *sides[0], counts) - _drawn(metric, *sides[1], counts)
    of_examples = float((drawn / len(values)).var())
    if not math.isfinite(of_examples):
        raise EnfoldError(f"{metric} must be finite in all draws of test examples for an interval, got infinite values")
    return student_interval(values, of_examples, level)


def _drawn(metric: str, p: Predictions, of_mean_member: bool, counts: Tensor) -> Tensor:
    """Return the metric in every draw of test examples, (R,)."""
    members = [p.member(index) for index in range(p.num_members)] if of_mean_member else [p]
    return torch.stack([bootstrap.replicates(metric, each, counts) for each in members]).mean(0)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method, in the same order; NaN stay and do not count."""
    known = sorted((p, index) for index, p in enumerate(values) if not math.isnan(p))
    adjusted, largest = list(values), 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted
