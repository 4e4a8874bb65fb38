"""Greedy selection: an ensemble picked from a pool, one candidate after the other, each as often as it helps.

R. Caruana, A. Niculescu-Mizil, G. Crew, A. Ksikes: Ensemble Selection from Libraries of Models, ICML 2004.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Which candidates were picked, in order, some of them repeatedly, and what that gave."""

    picks: tuple[int, ...]
    scores: tuple[float, ...]  # after each pick; lower is better, so an accuracy is counted as its negative

    @property
    def counts(self) -> dict[int, int]:
        """How often each was picked, in the order of their first picks."""
        return dict(Counter(self.picks))

    @property
    def weights(self) -> dict[int, float]:
        """Each one's share of the mean: picks [2, 7, 3, 3] weigh 1/4, 1/4 and 1/2."""
        return {index: count / len(self.picks) for index, count in self.counts.items()}


def greedy_selection(
    pool: Predictions | Sequence[Predictions], num_members: int, goal: Goal = "nll", max_picks: int = 64
) -> Selected:
    """Pick with replacement what makes the mean of the picks' probabilities best, until `num_members` different
    candidates are picked or nothing gets better; a list of `max_picks` has weights that are fine enough.

    The pool is one object with a candidate on each member axis, or several about the same examples: candidates may be
    of any architecture, so a pool of different networks makes this neural ensemble search (S. Zaidi et al., NeurIPS
    2021, arXiv:2006.08573). Use validation predictions: on those that candidates were trained on, the most overfitted
    one wins. Of equally good candidates the first is taken.
    """
    pool = _joined(pool)
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


def _joined(pool: Predictions | Sequence[Predictions]) -> Predictions:
    if isinstance(pool, Predictions):
        return pool
    if not pool:
        raise EnfoldError("a selection needs candidates, got none: pass the predictions of at least one")
    first = pool[0]
    for index, other in enumerate(pool):
        if other.num_classes != first.num_classes or not torch.equal(other.labels, first.labels):
            raise EnfoldError(
                f"all candidates must have predicted the same labelled examples, but candidate {index} differs from "
                "the first: predict one validation part with all of them"
            )
    return Predictions(torch.cat([each.log_probs for each in pool]), first.labels)


def _check(num_members: int, goal: str, max_picks: int) -> None:
    if num_members < 1:
        raise EnfoldError(f"an ensemble must have at least 1 member, got {num_members}: pass num_members >= 1")
    if max_picks < num_members:
        raise EnfoldError(
            f"there must be a pick for each of the {num_members} members, got max_picks={max_picks}: raise max_picks"
        )
    if goal not in get_args(Goal):
        raise EnfoldError(f"the goal of a selection must be one of {', '.join(get_args(Goal))}, got {goal!r}")


def _measure(goal: Goal, probs: Tensor, of_labels: Tensor, labels: Tensor) -> Callable[[list[int]], Tensor]:
    """What each candidate would make of the picks so far, (K,); lower is better, so an accuracy counts negatively."""

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
