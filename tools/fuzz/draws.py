"""Draws of a mutation: quick choices from a seed, as hypothesis needs longer for them than a reader for its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Choice = Callable[[Random], Any]


class Draws:
    """Draws values; hypothesis draws the seed and the tree.

    Args:
        seed: The seed.
        tree: Nested plain values for places in JSON.
    """

    def __init__(self, seed: int, tree: Any) -> None:
        self.random, self.tree = Random(seed), tree

    def __call__(self, choice: Choice) -> Any:
        """Return a value."""
        return choice(self.random)


def sampled_from(values: Sequence[Any]) -> Choice:
    """Draw one of some values."""
    return lambda random: random.choice(values)


def integers(low: int, high: int) -> Choice:
    """Draw an integer, both ends included."""
    return lambda random: random.randint(low, high)


def booleans() -> Choice:
    """Draw True or False."""
    return lambda random: random.random() < 0.5


def binary(low: int, high: int) -> Choice:
    """Draw bytes, a number of them with both ends included."""
    return lambda random: random.randbytes(random.randint(low, high))
