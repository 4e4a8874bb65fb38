"""MergeMany: each member in turn is matched to the mean of the others by weights, until nothing moves; then averaged.

    P_m = argmax over permutations  <(1/(M-1)) Σ_{k≠m} P_k(θ_k), P(θ_m)>,   m in a random order, repeatedly        (1)
    θ̄  = (1/M) Σ_m P_m(θ_m)                                                                                       (2)

No member is the reference: with many members, errors of matching to one of them do not add up. A step of (1) brings a
member nearer to the mean of the others and never away from it, so that the sum of squared distances between all members
never rises.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836, algorithm 3.

Differs from the paper: groups are found for any network; nothing else known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.merge.common.base import Alignment
from enfold.merge.common.states import mean_of
from enfold.seeds import derive, generator
from enfold.symmetry import Symmetry, permute, weight_matching


@dataclass(frozen=True)
class MergeMany(Alignment):
    """The mean of the members after each was matched to the mean of the others, in turn."""

    rounds: int = 100  # at most so many times through all members

    purpose: ClassVar[str] = "MergeMany"
    least: ClassVar[dict[str, float]] = {"rounds": 1}

    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """Equation (1) until no member moves."""
        learned = set(members.skeleton.parameters)
        found = list(states)
        source = generator(self.seed, "merge many")
        for number in range(self.rounds):
            moved = False
            for index in torch.randperm(len(found), generator=source).tolist():
                others = mean_of([state for other, state in enumerate(found) if other != index])
                seed = derive(self.seed, "merge many", number, index)
                orders = weight_matching(others, found[index], symmetry, seed=seed, learned=learned)  # (1)
                if any(not _identity(order) for order in orders.values()):
                    found[index], moved = permute(found[index], symmetry, orders), True
            if not moved:
                break
        return found


def _identity(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order)))
