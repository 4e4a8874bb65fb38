"""How much of the ensemble's gain one network recovers, and whether there was a gain to recover."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.distributions import several_members
from enfold.metrics.predictions import Predictions
from enfold.metrics.scores import example_correct, per_member
from enfold.seeds import generator

_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the bootstrap at some 30 MB


def gain_recovered(
    one: float,
    mean_member: float,
    ensemble: float,
    *,
    higher_is_better: bool,
    interval: tuple[float, float] | None = None,
) -> float:
    """(one - mean_member) / (ensemble - mean_member): 0 is as good as a member, 1 as good as the ensemble.

    NaN where there is no gain to recover, as a ratio to noise can be any number: if the ensemble is no better
    than its mean member, if one of the three is not finite, or if the interval of ensemble minus mean member
    (from `gain_interval`) holds 0.
    """
    gain = ensemble - mean_member
    improved = gain if higher_is_better else -gain
    if not all(map(math.isfinite, (one, mean_member, ensemble))) or improved <= 0:
        return math.nan
    if interval is not None and not beyond_noise(interval):
        return math.nan
    return (one - mean_member) / gain


def beyond_noise(interval: tuple[float, float]) -> bool:
    """Whether an interval of a difference leaves out 0."""
    low, high = interval
    return low > 0 or high < 0


def gain_interval(
    p: Predictions,
    score: Callable[[Predictions], Tensor] = example_correct,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The bootstrap interval of the ensemble's score minus its mean member's, by default of the accuracy."""
    several_members(p, "gain_interval")
    return paired_bootstrap(score(p), per_member(score, p).mean(0), samples=samples, seed=seed)


def paired_bootstrap(
    a_per_example: Tensor, b_per_example: Tensor, samples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """The percentile interval of mean(a) - mean(b) over resamples of the examples, a and b drawn together.

    It is the noise of a finite test set only; what another seed of the training would give is not in it.
    """
    difference = _difference(a_per_example, b_per_example)
    if samples < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"a bootstrap needs at least 1 sample and a level between 0 and 1, got {samples} and {level}: "
            "1000 and 0.95 are usual"
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
            f"a paired bootstrap needs two scores of the same examples, got the shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}: pass two tensors of one shape (N,)"
        )
    difference = a.detach().to("cpu", torch.float64) - b.detach().to("cpu", torch.float64)
    if not difference.isfinite().all():
        raise EnfoldError(
            f"a paired bootstrap needs finite scores, got {int((~difference.isfinite()).sum())} others: "
            "an infinite NLL comes from a label of probability 0"
        )
    return difference
