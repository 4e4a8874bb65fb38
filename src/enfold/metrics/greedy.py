"""Greedy selection of an ensemble from a pool of candidates, with replacement.

R. Caruana, A. Niculescu-Mizil, G. Crew, A. Ksikes: Ensemble Selection from Libraries of Models, ICML 2004.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import accuracy
from enfold.metrics.distributions import class_labels, member_log_probs, of_label
from enfold.metrics.predictions import Predictions

Goal = Literal["nll", "accuracy", "nll-accuracy"]


@dataclass(frozen=True)
class Selected:
    """The picked candidates in order, with repetitions, and the score after each pick."""

    picks: tuple[int, ...]
    scores: tuple[float, ...]  # after each pick; lower is better, so accuracies are negative

    @property
    def counts(self) -> dict[int, int]:
        """The number of times each candidate was selected, in the order of first selections."""
        return dict(Counter(self.picks))

    @property
    def weights(self) -> dict[int, float]:
        """The weight of each candidate in the mean: 1/4, 1/4 and 1/2 for picks [2, 7, 3, 3]."""
        return {index: count / len(self.picks) for index, count in self.counts.items()}


def greedy_selection(
    pool: Predictions | Sequence[Predictions], num_members: int, goal: Goal = "nll", max_picks: int = 64
) -> Selected:
    """Select candidates with replacement to optimize the mean of their probabilities.

    Each step picks the candidate that improves the mean most, the first of equally good ones, until `num_members`
    different candidates are picked or no candidate improves the score. With a pool of different architectures this is
    neural ensemble search (S. Zaidi et al., NeurIPS 2021, arXiv:2006.08573).

    Args:
        pool: Validation predictions of the candidates: one object with a candidate per member, or a list of
            predictions of the same examples. On training examples, the most overfitted candidate would win.
        num_members: Number of different candidates to select.
        goal: The score to optimize: "nll", "accuracy" or "nll-accuracy" (NLL minus accuracy).
        max_picks: Maximum number of picks including repetitions.

    Returns:
        The picks and their scores.

    Raises:
        EnfoldError: If an argument is invalid or the candidates predict different examples.
    """
    pool = _concatenate(pool).known()
    _check(num_members, goal, max_picks)
    log_probs, labels = member_log_probs(pool), class_labels(pool)
    probs = log_probs.exp()  # (K, N, C)
    of_labels = of_label(log_probs, labels).exp()  # (K, N)
    measure = _measure(goal, probs, of_labels, pool.labels)
    picks: list[int] = []
    scores: list[float] = []
    while len(set(picks)) < num_members and len(picks) < max_picks:
        values = measure(picks)  # (K,)
        best = int(values.argmin())
        if picks and not float(values[best]) < scores[-1]:
            break
        picks.append(best)
        scores.append(float(values[best]))
    return Selected(tuple(picks), tuple(scores))


def _concatenate(pool: Predictions | Sequence[Predictions]) -> Predictions:
    for each in [] if isinstance(pool, Predictions) else pool:
        if not isinstance(each, Predictions):
            raise EnfoldError(
                f"pool must be predictions of classes, got {type(each).__name__}: use a task with classes, or select "
                "members yourself with `subset`"
            )
    if isinstance(pool, Predictions):
        return pool
    if not pool:
        raise EnfoldError("pool must have at least one candidate, got an empty list: pass the candidates' predictions")
    first = pool[0]
    for index, other in enumerate(pool):
        if other.num_classes != first.num_classes or not torch.equal(other.labels, first.labels):
            raise EnfoldError(
                f"pool must have predictions of the same examples, got other labels or classes for candidate {index} "
                "than for candidate 0: predict the same validation split with all candidates"
            )
    return replace(first, log_probs=torch.cat([each.log_probs for each in pool]), weights=None)


def _check(num_members: int, goal: str, max_picks: int) -> None:
    if num_members < 1:
        raise EnfoldError(f"num_members must be at least 1, got {num_members}: raise num_members")
    if max_picks < num_members:
        raise EnfoldError(f"max_picks must be at least num_members = {num_members}, got {max_picks}: raise max_picks")
    if goal not in get_args(Goal):
        raise EnfoldError(f"goal must be one of {', '.join(get_args(Goal))}, got {goal!r}: choose one of these")


def _measure(goal: Goal, probs: Tensor, of_labels: Tensor, labels: Tensor) -> Callable[[list[int]], Tensor]:
    """Return a function that maps the picks so far to the score (K,) after adding each candidate; lower is better."""

    def nll(picks: list[int]) -> Tensor:
        return -((of_labels[picks].sum(0) + of_labels) / (len(picks) + 1)).log().mean(1)

    def error(picks: list[int]) -> Tensor:
        base = probs[picks].sum(0)  # (N, C)
        means = ((base + own) / (len(picks) + 1) for own in probs)
        found = [-accuracy(Predictions(mean.log()[None], labels)) for mean in means]
        return torch.tensor(found, dtype=torch.float64)

    def both(picks: list[int]) -> Tensor:
        return nll(picks) + error(picks)

    return {"nll": nll, "accuracy": error, "nll-accuracy": both}[goal]
