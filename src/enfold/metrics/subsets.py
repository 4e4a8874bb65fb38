"""Smaller ensembles out of one: a metric by the number of members, and modes of several samples each."""

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
    """The mean of a metric over all subsets of so many members; over `limit` different ones where there are more."""
    values = [metric(p.subset(members)) for members in subsets(p.num_members, size, limit=limit, seed=seed)]
    return sum(values) / len(values)


def subsets(num_members: int, size: int, *, limit: int = 1000, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """All subsets of so many members, or `limit` different ones where there are more."""
    if not 1 <= size <= num_members:
        raise EnfoldError(f"a subset must have 1 to {num_members} members, got {size}: choose a size between")
    if limit < 1:
        raise EnfoldError(f"the limit must be at least 1 subset, got {limit}: raise limit")
    if math.comb(num_members, size) <= limit:
        return combinations(range(num_members), size)
    return _drawn(num_members, size, limit, seed)


def _drawn(num_members: int, size: int, limit: int, seed: int) -> Iterator[tuple[int, ...]]:
    source, seen = generator(seed, "subsets", num_members, size), set[tuple[int, ...]]()
    while len(seen) < limit:
        members = tuple(sorted(torch.randperm(num_members, generator=source)[:size].tolist()))
        if members not in seen:
            seen.add(members)
            yield members


def over_modes(modes: Sequence[Predictions]) -> Predictions:
    """One member a mode: the mean probability of that mode's samples, so that modes count alike however many they are.

    Take the predictions of several subspace ensembles; the mean of what is returned is the ensemble over modes.
    """
    if not modes:
        raise EnfoldError("modes must be at least 1, got none: pass the predictions of each mode")
    for index, p in enumerate(modes):
        if not torch.equal(p.labels, modes[0].labels) or p.num_classes != modes[0].num_classes:
            raise EnfoldError(
                f"all modes must have predicted the same examples, but mode {index} has other labels or classes than "
                "mode 0: predict one part of the data with all"
            )
    return Predictions(torch.cat([p.mean().log_probs for p in modes]), modes[0].labels)
