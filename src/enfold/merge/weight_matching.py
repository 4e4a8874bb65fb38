"""Weight matching: members' hidden units are put in the order nearest to one member's by weights, then averaged.

    P_m = argmax over permutations  <θ_r, P(θ_m)>   of every group of units that may be permuted                  (1)
    θ̄  = (1/M) Σ_m P_m(θ_m),   P_r = identity                                                                     (2)

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836.

Needs no data but for batch-norm statistics. Exact where there is one hidden layer; else a local optimum of (1), found
group by group, that never lies below the members' own order.

Differs from the paper: groups are found for any network; more than two members are all matched to the reference (see
`merge_many` for the paper's own way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.merge.common.base import Alignment
from enfold.merge.common.states import require_reference
from enfold.symmetry import Symmetry, matched_to


@dataclass(frozen=True)
class WeightMatching(Alignment):
    """The mean of the members after their units were matched to one member's by weights."""

    reference: int = 0  # the member whose order the others are put in
    rounds: int = 100  # at most so many times through all groups

    purpose: ClassVar[str] = "weight matching"
    least: ClassVar[dict[str, float]] = {"reference": 0, "rounds": 1}

    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """Each member in the order of equation (1)."""
        goal = states[require_reference(self.reference, len(states))]
        learned = set(members.skeleton.parameters)
        settings: dict[str, Any] = {"seed": self.seed, "rounds": self.rounds, "learned": learned}
        return [state if state is goal else matched_to(goal, state, symmetry, **settings) for state in states]  # (1)
