"""Members whose hidden units are to be put in one order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.symmetry import Symmetry


@dataclass(frozen=True)
class Alignment:
    """Members whose hidden units are to be put in one order.

    Args:
        ensemble: The members.
        states: Their parameters and buffers, member by member.
        symmetry: The groups of units that may be permuted.
        data: Training and validation examples.
        checkpoint: A file for methods that train.
    """

    ensemble: Ensemble
    states: list[State]
    symmetry: Symmetry
    data: Data
    checkpoint: Path | None = None

    @property
    def parameters(self) -> set[str]:
        """The names of the tensors by which units are compared."""
        return set(self.ensemble.skeleton.parameters)


Match = Callable[[Alignment], list[State]]
"""Return the states with their units in orders that fit together; no member's function changes."""
