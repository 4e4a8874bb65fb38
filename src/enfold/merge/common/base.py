"""What every merge keeps to: hidden units are brought together, the weights become one network, its statistics fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge.common.folding import Composable, require_data, require_members
from enfold.merge.common.states import mean_of, states_of, units_of
from enfold.merge.repair import Correction, corrected
from enfold.symmetry import Symmetry


@dataclass(frozen=True)
class Merge(Composable, ABC):
    """A fold of weights: a subclass says how members are brought together."""

    repair: Correction = "reset"  # none, reset (norms measured again), repair (units), rescale (spreads) or closed_form
    seed: int = 0  # of all that is drawn

    purpose: ClassVar[str] = "a merge"
    least: ClassVar[dict[str, float]] = {}  # what a subclass's own numbers must not be below

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in self.least.items():
            if not getattr(self, name) >= least:
                raise EnfoldError(
                    f"{name} must be {least} or more, got {getattr(self, name)}: {getattr(type(self), name)} is usual"
                )

    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """One network; a single member is returned as it is."""
        members = require_members(members, self.purpose, averaged=True, data=data)
        require_data(data, self.purpose)
        if members.num_members == 1:
            return members.member(0).eval()
        network = members.network(self.merged(members, data, checkpoint))
        return corrected(network, members, data, self.repair, seed=self.seed).eval()

    @abstractmethod
    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
        """The one network's values, of two members or more."""


@dataclass(frozen=True)
class Alignment(Merge, ABC):
    """A merge that puts every member's units in another order, which changes no member's function, and averages."""

    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
        """The mean of the members in their new orders."""
        return mean_of(self._ordered(members, data, checkpoint))

    def matched(self, members: Ensemble, data: Data, *, checkpoint: Path | None = None) -> DeepEnsemble:
        """The members in the orders in which they are averaged; each computes what it did."""
        members = require_members(members, self.purpose, data=data)
        require_data(data, self.purpose)
        states = self._ordered(members, data, checkpoint)
        return DeepEnsemble([members.network(state) for state in states], engine=members.engine)

    def _ordered(self, members: Ensemble, data: Data, checkpoint: Path | None) -> list[State]:
        states = states_of(members)
        symmetry = units_of(members.network(states[0]), data, self.seed)
        if symmetry.groups and len(states) > 1:
            with torch.random.fork_rng(devices=[]):
                states = self.ordered(states, symmetry, members, data, checkpoint and Path(checkpoint))
        return states

    @abstractmethod
    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """The states with their units in orders that fit together."""
