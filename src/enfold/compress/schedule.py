"""Rounds of a search: many routes are trained for a few epochs, fewer for more epochs, and one for all epochs.

Each round trains its routes from the beginning, because a cosine schedule depends on its length. All routes are
compared after a few epochs, and the better third, at least four, enters the next round (successive halving;
K. Jamieson, A. Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHORT = 4  # the last round before the final one has a fraction 1 / SHORT of the epochs
FIRST = 8  # the first one of many routes
FEW = 5  # routes that are compared in one round
KEPT = 3  # one route in KEPT goes from the first round to the second
FEWEST = 3  # routes that are tried even if trainings must be shortened for them
LONG = 2  # times the epochs of the final round, if time is left, as long as that improves
LONGEST = 8  # times the epochs, at most


@dataclass(frozen=True)
class Round:
    """Short trainings of some routes.

    Args:
        epochs: Epochs of each.
        kept: Number of routes that enter the next round.
    """

    epochs: int
    kept: int


def make_rounds(num_routes: int, epochs: int) -> list[Round]:
    """Return the rounds before the final one; none for one route, or for one epoch.

    Args:
        num_routes: Number of routes.
        epochs: Epochs of the final round.
    """
    if num_routes < 2 or epochs < 2:
        return []
    short = max(1, epochs // SHORT)
    first = max(1, epochs // FIRST)
    if num_routes <= FEW or first == short:
        return [Round(short, 1)]
    return [Round(first, max(FEW - 1, math.ceil(num_routes / KEPT))), Round(short, 1)]


def count_epochs(efforts: Sequence[float], epochs: int, controls: int) -> float:
    """Return the epochs of all trainings of a search, in units of a plain distillation.

    Args:
        efforts: Duration of an epoch of each route in these units, most promising first.
        epochs: Epochs of the final round.
        controls: Number of controls.
    """
    total, left = 0.0, list(efforts)
    for each in make_rounds(len(left), epochs):
        total += each.epochs * sum(left)
        left = sorted(left, reverse=True)[: each.kept]  # the most expensive ones may win
    return total + epochs * (max(left[:1], default=0.0) + controls)


def plan_epochs(efforts: Sequence[float], epochs: int, controls: int, units: float) -> tuple[int, int]:
    """Return how many routes to try and how long to train, within a limit.

    All routes are tried if that fits; else fewer of them, and if `FEWEST` are too many, trainings are shortened.

    Args:
        efforts: Duration of an epoch of each route, most promising first.
        epochs: Wanted epochs of the final round.
        controls: Number of controls.
        units: Affordable epochs of a plain distillation.
    """
    for number in range(len(efforts), FEWEST - 1, -1):
        if count_epochs(efforts[:number], epochs, controls) <= units:
            return number, epochs
    number = min(FEWEST, len(efforts))
    while epochs > 1 and count_epochs(efforts[:number], epochs, controls) > units:
        epochs -= max(1, epochs // 50)
    return number, epochs
