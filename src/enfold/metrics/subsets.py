"""Metrics of subsets of the members, and ensembles over modes of several samples each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions
from enfold.seeds import generator


def over_subsets(
    metric: Callable[[Predictions], float], p: Predictions, size: int, *, limit: int = 1000, seed: int = 0
) -> float:
    """Return the mean of a metric over all subsets of a given number of members.

    Args:
        metric: The metric.
        p: Predictions of the ensemble.
        size: Number of members in each subset.
        limit: If there are more subsets, use this many random ones.
        seed: Seed of the random subsets.

    Raises:
        EnfoldError: If `size` or `limit` is out of range.
    """
    values = [metric(p.subset(members)) for members in subsets(p.num_members, size, limit=limit, seed=seed)]
    return sum(values) / len(values)


def subsets(num_members: int, size: int, *, limit: int = 1000, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Return all subsets of `size` members, or `limit` different random ones if there are more.

    Args:
        num_members: The number of members.
        size: The number of members in a subset.
        limit: The maximum number of subsets of one size.
        seed: The seed.

    Raises:
        EnfoldError: If `size` or `limit` is out of range.
    """
    if not 1 <= size <= num_members:
        raise EnfoldError(f"size must be from 1 to num_members = {num_members}, got {size}: change size")
    if limit < 1:
        raise EnfoldError(f"limit must be at least 1, got {limit}: raise limit")
    if math.comb(num_members, size) <= limit:
        return combinations(range(num_members), size)
    return _draw_subsets(num_members, size, limit, seed)


def _draw_subsets(num_members: int, size: int, limit: int, seed: int) -> Iterator[tuple[int, ...]]:
    source, seen = generator(seed, "subsets", num_members, size), set[tuple[int, ...]]()
    while len(seen) < limit:
        members = tuple(sorted(torch.randperm(num_members, generator=source)[:size].tolist()))
        if members not in seen:
            seen.add(members)
            yield members


def over_modes(modes: Sequence[Predictions]) -> Predictions:
    """Return predictions with one member per mode: the mean probability of that mode's samples.

    All modes get the same weight in the mean, whatever their number of samples.

    Args:
        modes: Predictions of several subspace ensembles for the same examples.

    Raises:
        EnfoldError: If `modes` is empty or the examples differ.
    """
    if not modes:
        raise EnfoldError("modes must have at least 1 element, got none: pass the predictions of each mode")
    for index, p in enumerate(modes):
        if not torch.equal(p.labels, modes[0].labels) or p.num_classes != modes[0].num_classes:
            raise EnfoldError(
                f"modes must be predictions of the same examples, got other labels or classes for mode {index} than "
                "for mode 0: predict the same split with all modes"
            )
    return Predictions(torch.cat([p.mean().log_probs for p in modes]), modes[0].labels)
