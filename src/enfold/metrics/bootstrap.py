"""Bootstrap: is one model better than another, or would other seeds and other test examples say otherwise?

A replicate draws test examples with replacement. All that is needed of a draw is how often each example is in it,
so a metric in R replicates is a product of the counts (R, N) with features of the examples (N, K), never a loop.
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
from enfold.metrics.distributions import class_labels, ensemble_log_probs, member_log_probs, several_members
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

BETWEEN_MEMBERS = ("disagreement", "diversity")  # one network alone has none

_ENTRIES_AT_ONCE = 2_000_000  # of counts in float64: bounds the memory of a product at some 50 MB


@dataclass(frozen=True)
class Difference:
    """A metric of one model minus that of another: the mean over seeds and its bootstrap interval."""

    mean: float
    lower: float
    upper: float
    values: tuple[float, ...]  # one a seed

    def verdict(self, expected: Relation) -> Verdict:
        """Whether the first model was above, or below, the second, as far as the interval can tell."""
        if expected not in ("above", "below"):
            raise EnfoldError(f"a difference is expected to be 'above' or 'below', got {expected!r}: choose one")
        if self.lower <= 0 <= self.upper:
            return "within noise"
        return "held" if (self.lower > 0) == (expected == "above") else "not held"


def metric_value(name: str, p: Predictions, *, of_mean_member: bool = False) -> float:
    """A metric that `replicates` knows, of the ensemble or as the mean over members of each alone."""
    metric = _known(name)[0]
    _refuse_alone(name, of_mean_member)
    return mean_member(metric, p) if of_mean_member else metric(p)


def replicates(name: str, predictions: Predictions, counts: Tensor) -> Tensor:
    """The metric in each bootstrap replicate (R,), given how often each example was drawn (R, N).

    The bins of the ECE do not move with the draw, and a replicate in which disagreeing members make no error
    has an infinite diversity, as in `enfold.metrics`.
    """
    if (
        counts.ndim != 2
        or counts.shape[1] != len(predictions)
        or bool((counts < 0).any() or (counts.sum(1) == 0).any())
    ):
        raise EnfoldError(
            f"counts must say how often each of the {len(predictions)} examples was drawn, at least one a replicate, "
            f"got the shape {tuple(counts.shape)}: make them with draw_counts"
        )
    return _blockwise(_known(name)[1](predictions), counts)


def draw_counts(size: int, replicates: int, seed: int) -> Tensor:
    """How often each of `size` examples is drawn when `size` are, with replacement: (R, N), rows sum to N.

    R replicates are the first R of R + 1. One byte holds a count: with more than 255 examples, the chance that one
    of them is drawn more than 255 times is below 10^-500.
    """
    if size < 1 or replicates < 1:
        raise EnfoldError(
            f"a bootstrap needs at least 1 example and 1 replicate, got {size} and {replicates}: 2000 is usual"
        )
    return _drawn(size, replicates, seed).clone()


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
    """A metric of `first` minus that of `second`, mean over seeds, with a percentile interval.

    Each replicate draws seeds with replacement and test examples with replacement, the same for both models. With
    `examples="shared"` all seeds of a replicate see the same draw of examples: they were judged by one test set, and
    an example that favours a model favours it for every seed. With "own" every drawn seed draws anew, for seeds
    that have a test set each. With one seed the noise of the test set alone is in the interval. Of S seeds,
    resampling shows (S - 1) / S of the variance between seeds: with few the interval is somewhat narrow.
    """
    _check_pairs(first, second, examples)
    if replicates < 1 or not 0 < level < 1:
        raise EnfoldError(
            f"a bootstrap needs at least 1 replicate and a level between 0 and 1, got {replicates} and {level}: "
            "2000 and 0.95 are usual"
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
    means = _finite(name, _resampled(pairs, sizes, replicates, seed, shared=examples == "shared"))
    tail = (1 - level) / 2
    lower, upper = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(sum(values) / len(values), lower, upper, values)


def _resampled(
    pairs: Sequence[tuple[Estimator, Estimator]], sizes: Sequence[int], replicates: int, seed: int, *, shared: bool
) -> Tensor:
    """The mean difference over the seeds drawn, in each replicate (R,)."""
    S = len(pairs)
    drawn = torch.randint(S, (replicates, S), generator=generator(seed, "bootstrap", "seeds"))
    total = torch.zeros(replicates, dtype=torch.float64)
    for place in range(S):
        for index, (first, second) in enumerate(pairs):
            chosen = (drawn[:, place] == index).nonzero()[:, 0]
            if len(chosen):
                stream = seed if shared else derive(seed, "bootstrap", "place", place)
                counts = _drawn(sizes[index], replicates, stream)[chosen]
                total[chosen] += _blockwise(first, counts) - _blockwise(second, counts)
    return total / S


@lru_cache(maxsize=1)  # many differences are asked for with one draw, which takes longer than the products
def _drawn(size: int, replicates: int, seed: int) -> Tensor:
    rng = generator(seed, "bootstrap", "examples")
    counts = torch.zeros(replicates, size, dtype=torch.uint8)
    for block in counts.split(max(1, _ENTRIES_AT_ONCE // size)):
        drawn = torch.randint(size, block.shape, generator=rng)
        block.scatter_add_(1, drawn, torch.ones(1, 1, dtype=torch.uint8).expand(block.shape))
    return counts


def _blockwise(estimator: Estimator, counts: Tensor) -> Tensor:
    blocks = counts.split(max(1, _ENTRIES_AT_ONCE // counts.shape[1]))
    return torch.cat([estimator(block.to("cpu", torch.float64)) for block in blocks])


def _estimator(name: str, p: Predictions, of_mean_member: bool) -> Estimator:
    make = _known(name)[1]
    _refuse_alone(name, of_mean_member)
    if not of_mean_member:
        return make(p)
    alone = [make(p.member(m)) for m in range(p.num_members)]
    return lambda counts: torch.stack([estimate(counts) for estimate in alone]).mean(0)


def _mean_of(score: Callable[[Predictions], Tensor]) -> Callable[[Predictions], Estimator]:
    def make(p: Predictions) -> Estimator:
        values = score(p)
        finite, infinite = values.masked_fill(values.isinf(), 0.0), values.isinf().double()

        def estimate(counts: Tensor) -> Tensor:
            means = counts @ finite / counts.sum(1)
            return means.masked_fill(counts @ infinite > 0, torch.inf)  # 0 draws of an infinite score count nothing

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
    features, _, _ = _different(p)
    return lambda counts: (counts @ features / counts.sum(1, keepdim=True)).mean(1)


def _diversity(p: Predictions) -> Estimator:
    different, i, j = _different(p)
    right = per_member(example_correct, p).T  # (N, M)

    def estimate(counts: Tensor) -> Tensor:
        total = counts.sum(1, keepdim=True)
        pairs, error = counts @ different / total, 1.0 - counts @ right / total  # (R, pairs), (R, M)
        scaled = (pairs / error[:, i] + pairs / error[:, j]) / 2
        return torch.where(pairs > 0, scaled, 0.0).mean(1)

    return estimate


def _different(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Where the members i < j give different classes (N, pairs), and i and j."""
    several_members(p, "disagreement")
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


def _known(name: str) -> tuple[Callable[[Predictions], float], Callable[[Predictions], Estimator]]:
    if name not in BOOTSTRAPPED:
        close = closest(name, BOOTSTRAPPED)
        raise EnfoldError(
            f"a metric to resample must be one of {', '.join(BOOTSTRAPPED)}, got '{name}': "
            + (f"did you mean '{close}'?" if close else "choose one")
        )
    return BOOTSTRAPPED[name]


def _refuse_alone(name: str, of_mean_member: bool) -> None:
    if of_mean_member and name in BETWEEN_MEMBERS:
        raise EnfoldError(
            f"{name} compares members with one another, got it for each member alone: leave mean_member False"
        )


def _check_pairs(first: Sequence[Predictions], second: Sequence[Predictions], examples: str) -> None:
    if examples not in ("shared", "own"):
        raise EnfoldError(f"examples must be 'shared' or 'own', got {examples!r}: choose one")
    if not first or len(first) != len(second):
        raise EnfoldError(
            f"a paired difference needs the predictions of the same seeds, got {len(first)} and {len(second)}: "
            "pass one a seed of each model"
        )
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if not torch.equal(one.labels.cpu(), other.labels.cpu()):
            raise EnfoldError(
                f"a paired difference needs the same examples for both models, but at place {index} their labels "
                "differ: predict one test set with both"
            )
        if examples == "shared" and not torch.equal(one.labels.cpu(), first[0].labels.cpu()):
            raise EnfoldError(
                f"seeds that share a draw of examples need one test set, but the labels at place {index} differ from "
                "the first: pass examples='own'"
            )


def _finite(name: str, means: Tensor) -> Tensor:
    wrong = int((~means.isfinite()).sum())
    if wrong:
        raise EnfoldError(
            f"an interval of {name} needs finite values, got others in {wrong} of {len(means)} replicates: "
            "an infinite NLL comes from a label of probability 0, an infinite diversity from members without errors"
        )
    return means
