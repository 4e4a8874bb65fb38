"""Paired bootstrap over seeds and test examples, to compare two models.

A replicate draws test examples with replacement. A draw is represented by how often it contains each example, so that
a metric in R replicates is a product of counts (R, N) with features of the examples (N, K).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from enfold.errors import EnfoldError, closest
from enfold.metrics.calibration import _EDGE, ece, reliability
from enfold.metrics.distributions import class_labels, ensemble_log_probs, member_log_probs, require_members
from enfold.metrics.diversity import disagreement, normalised_disagreement
from enfold.metrics.predictions import Predictions
from enfold.metrics.scores import (
    accuracy,
    brier,
    example_brier,
    example_correct,
    example_nll,
    mean_member,
    nll,
    per_member,
)
from enfold.metrics.selective import aurc, aurc_estimator
from enfold.seeds import derive, generator

Relation = Literal["above", "below"]
Verdict = Literal["held", "not held", "within noise"]
Estimator = Callable[[Tensor], Tensor]  # counts (R, N) in float64 -> the metric in each replicate (R,)

BETWEEN_MEMBERS = ("disagreement", "diversity")  # undefined for a single network

_ENTRIES_AT_ONCE = 2_000_000  # counts in float64 per block: limits the memory of a product to about 50 MB


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between two models: the mean over seeds and its bootstrap interval.

    Args:
        mean: Mean over seeds.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        values: The difference of each seed.
    """

    mean: float
    lower: float
    upper: float
    values: tuple[float, ...]  # one per seed

    def verdict(self, expected: Relation) -> Verdict:
        """Return whether the interval confirms an expected sign of the difference.

        Args:
            expected: Whether the first model is expected "above" or "below" the second.

        Returns:
            "held", "not held", or "within noise" if the interval contains 0.

        Raises:
            EnfoldError: If `expected` is neither "above" nor "below".
        """
        if expected not in ("above", "below"):
            raise EnfoldError(f"expected must be 'above' or 'below', got {expected!r}: choose one of the two")
        if self.lower <= 0 <= self.upper:
            return "within noise"
        return "held" if (self.lower > 0) == (expected == "above") else "not held"


def metric_value(name: str, p: Predictions, *, of_mean_member: bool = False) -> float:
    """Return a metric of the ensemble, or its mean over the single members.

    Args:
        name: A metric that `replicates` supports.
        p: Predictions of the ensemble.
        of_mean_member: Compute the metric for each member and return the mean.

    Raises:
        EnfoldError: If the metric is unknown, or compares members and `of_mean_member` is set.
    """
    metric = _find_metric(name)[0]
    _check_mean_member(name, of_mean_member)
    return mean_member(metric, p) if of_mean_member else metric(p)


def replicates(name: str, predictions: Predictions, counts: Tensor) -> Tensor:
    """Return the metric in each bootstrap replicate.

    The bins of the ECE are the same in all replicates. As in `normalised_disagreement`, the diversity of a replicate
    in which disagreeing members make no error is infinite.

    Args:
        name: The metric: "accuracy", "nll", "brier", "ece", "aurc", "disagreement" or "diversity".
        predictions: Predictions of the ensemble.
        counts: How often each replicate contains each example, (R, N), for example from `draw_counts`.

    Returns:
        A tensor of shape (R,).

    Raises:
        EnfoldError: If the metric is unknown or `counts` does not fit the predictions.
    """
    if (
        counts.ndim != 2
        or counts.shape[1] != len(predictions)
        or bool((counts < 0).any() or (counts.sum(1) == 0).any())
    ):
        raise EnfoldError(
            f"counts must have shape (R, {len(predictions)}) with non-negative values and no empty row, got shape "
            f"{tuple(counts.shape)}: create counts with draw_counts"
        )
    return _estimate_blockwise(_find_metric(name)[1](predictions), counts)


def draw_counts(size: int, replicates: int, seed: int) -> Tensor:
    """Return how often each example is drawn in each bootstrap replicate.

    R replicates are the first R of R + 1. The counts are uint8: with more than 255 examples, the probability that one
    of them is drawn more than 255 times is below 10^-500.

    Args:
        size: Number of examples N.
        replicates: Number of replicates R.
        seed: Seed of the draws.

    Returns:
        Counts of shape (R, N); rows sum to N.

    Raises:
        EnfoldError: If `size` or `replicates` is below 1.
    """
    if size < 1 or replicates < 1:
        raise EnfoldError(
            f"size and replicates must be at least 1, got size={size} and replicates={replicates}: use for example "
            "replicates=2000"
        )
    return _draw_counts(size, replicates, seed).clone()


def paired_difference(
    first: Sequence[Predictions],
    second: Sequence[Predictions],
    name: str,
    *,
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    mean_member: tuple[bool, bool] = (False, False),
    examples: Literal["shared", "own"] = "shared",
) -> Difference:
    """Return the difference of a metric between two models, mean over seeds, with a percentile interval.

    Each replicate draws seeds and test examples with replacement, the same for both models. With one seed, the
    interval covers the noise of the test set only. With S seeds, resampling shows (S - 1) / S of the variance between
    seeds, so that the interval is slightly too narrow for few seeds.

    Args:
        first: Predictions of the first model, one per seed.
        second: Predictions of the second model for the same seeds and examples.
        name: A metric that `replicates` supports.
        replicates: Number of bootstrap replicates.
        level: Confidence level of the interval.
        seed: Seed of the bootstrap.
        mean_member: For each model, use the mean over its single members instead of the ensemble.
        examples: "shared" if all seeds were evaluated on one test set: they use the same draw of examples, because an
            example that favours a model favours it for every seed. "own" if each seed has its own test set.

    Returns:
        The first model's metric minus the second's.

    Raises:
        EnfoldError: If the predictions do not correspond, an argument is out of range or a replicate is not finite.
    """
    _check_pairs(first, second, examples)
    if replicates < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"replicates must be at least 1 and level between 0 and 1, got replicates={replicates} and level={level}: "
            "use for example replicates=2000 and level=0.95"
        )
    pairs = [
        (_estimator(name, one, mean_member[0]), _estimator(name, other, mean_member[1]))
        for one, other in zip(first, second, strict=True)
    ]
    values = tuple(
        metric_value(name, one, of_mean_member=mean_member[0])
        - metric_value(name, other, of_mean_member=mean_member[1])
        for one, other in zip(first, second, strict=True)
    )
    sizes = [len(one) for one in first]
    means = _resample_differences(pairs, sizes, replicates, seed, shared=examples == "shared")
    _require_finite(name, means)
    tail = (1 - level) / 2
    lower, upper = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(sum(values) / len(values), lower, upper, values)


def _resample_differences(
    pairs: Sequence[tuple[Estimator, Estimator]], sizes: Sequence[int], replicates: int, seed: int, *, shared: bool
) -> Tensor:
    """Return the mean difference over the drawn seeds in each replicate (R,)."""
    S = len(pairs)
    drawn = torch.randint(S, (replicates, S), generator=generator(seed, "bootstrap", "seeds"))
    total = torch.zeros(replicates, dtype=torch.float64)
    for place in range(S):
        for index, (first, second) in enumerate(pairs):
            chosen = (drawn[:, place] == index).nonzero()[:, 0]
            if len(chosen):
                stream = seed if shared else derive(seed, "bootstrap", "place", place)
                counts = _draw_counts(sizes[index], replicates, stream)[chosen]
                total[chosen] += _estimate_blockwise(first, counts) - _estimate_blockwise(second, counts)
    return total / S


@lru_cache(maxsize=1)  # many differences use the same draw, which takes longer than the products
def _draw_counts(size: int, replicates: int, seed: int) -> Tensor:
    rng = generator(seed, "bootstrap", "examples")
    counts = torch.zeros(replicates, size, dtype=torch.uint8)
    for block in counts.split(max(1, _ENTRIES_AT_ONCE // size)):
        drawn = torch.randint(size, block.shape, generator=rng)
        block.scatter_add_(1, drawn, torch.ones(1, 1, dtype=torch.uint8).expand(block.shape))
    return counts


def _estimate_blockwise(estimator: Estimator, counts: Tensor) -> Tensor:
    blocks = counts.split(max(1, _ENTRIES_AT_ONCE // counts.shape[1]))
    return torch.cat([estimator(block.to("cpu", torch.float64)) for block in blocks])


def _estimator(name: str, p: Predictions, of_mean_member: bool) -> Estimator:
    make = _find_metric(name)[1]
    _check_mean_member(name, of_mean_member)
    if not of_mean_member:
        return make(p)
    members = [make(p.member(m)) for m in range(p.num_members)]
    return lambda counts: torch.stack([estimate(counts) for estimate in members]).mean(0)


def _mean_of(score: Callable[[Predictions], Tensor]) -> Callable[[Predictions], Estimator]:
    def make(p: Predictions) -> Estimator:
        values = score(p)
        finite, infinite = values.masked_fill(values.isinf(), 0.0), values.isinf().double()

        def estimate(counts: Tensor) -> Tensor:
            means = counts @ finite / counts.sum(1)
            return means.masked_fill(counts @ infinite > 0, torch.inf)  # 0 times infinity would be NaN

        return estimate

    return make


def _ece(p: Predictions) -> Estimator:
    confidence, predicted = ensemble_log_probs(p).max(-1)
    confidence = confidence.exp()
    gap = confidence - (predicted == class_labels(p)).double()
    edges = reliability(p).edges[1:-1] + _EDGE
    bins = torch.nn.functional.one_hot(torch.searchsorted(edges, confidence), len(edges) + 1)
    features = bins * gap[:, None]  # (N, bins): n_b |accuracy_b - confidence_b| is |Σ of a column|
    return lambda counts: (counts @ features).abs().sum(1) / counts.sum(1)


def _disagreement(p: Predictions) -> Estimator:
    features, _, _ = _pairwise_differences(p)
    return lambda counts: (counts @ features / counts.sum(1, keepdim=True)).mean(1)


def _diversity(p: Predictions) -> Estimator:
    different, i, j = _pairwise_differences(p)
    right = per_member(example_correct, p).T  # (N, M)

    def estimate(counts: Tensor) -> Tensor:
        total = counts.sum(1, keepdim=True)
        pairs, error = counts @ different / total, 1.0 - counts @ right / total  # (R, pairs), (R, M)
        scaled = (pairs / error[:, i] + pairs / error[:, j]) / 2
        return torch.where(pairs > 0, scaled, 0.0).mean(1)

    return estimate


def _pairwise_differences(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return where members i < j predict different classes (N, pairs), with the indices i and j."""
    require_members(p, "disagreement")
    predicted = member_log_probs(p).argmax(-1)
    i, j = torch.triu_indices(p.num_members, p.num_members, offset=1)
    return (predicted[i] != predicted[j]).T.double(), i, j


BOOTSTRAPPED: dict[str, tuple[Callable[[Predictions], float], Callable[[Predictions], Estimator]]] = {
    "accuracy": (accuracy, _mean_of(example_correct)),
    "nll": (nll, _mean_of(example_nll)),
    "brier": (brier, _mean_of(example_brier)),
    "ece": (ece, _ece),
    "aurc": (aurc, aurc_estimator),
    "disagreement": (disagreement, _disagreement),
    "diversity": (normalised_disagreement, _diversity),
}


def _find_metric(name: str) -> tuple[Callable[[Predictions], float], Callable[[Predictions], Estimator]]:
    if name not in BOOTSTRAPPED:
        close = closest(name, BOOTSTRAPPED)
        raise EnfoldError(
            f"name must be one of {', '.join(BOOTSTRAPPED)}, got '{name}': "
            + (f"did you mean '{close}'?" if close else "choose one of these")
        )
    return BOOTSTRAPPED[name]


def _check_mean_member(name: str, of_mean_member: bool) -> None:
    if of_mean_member and name in BETWEEN_MEMBERS:
        raise EnfoldError(
            f"mean_member must be False for {name}, which compares members with each other, got True: use "
            "mean_member=False"
        )


def _check_pairs(first: Sequence[Predictions], second: Sequence[Predictions], examples: str) -> None:
    if examples not in ("shared", "own"):
        raise EnfoldError(f"examples must be 'shared' or 'own', got {examples!r}: choose one of the two")
    if not first or len(first) != len(second):
        raise EnfoldError(
            f"first and second must contain the predictions of the same seeds, got {len(first)} and {len(second)}: "
            "pass one Predictions per seed for each model"
        )
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if not torch.equal(one.labels.cpu(), other.labels.cpu()):
            raise EnfoldError(
                f"first and second must be predictions of the same examples, got different labels at index {index}: "
                "predict the same test set with both models"
            )
        if examples == "shared" and not torch.equal(one.labels.cpu(), first[0].labels.cpu()):
            raise EnfoldError(
                f"examples='shared' needs one test set for all seeds, got other labels at index {index} than at 0: "
                "use examples='own'"
            )


def _require_finite(name: str, means: Tensor) -> None:
    wrong = int((~means.isfinite()).sum())
    if wrong:
        raise EnfoldError(
            f"{name} must be finite in all replicates for an interval, got {wrong} of {len(means)} infinite or NaN: "
            "an infinite NLL comes from a label of probability 0, an infinite diversity from members without errors"
        )
