"""Networks that students start from."""

from __future__ import annotations

from torch import nn

from enfold.data import Data
from enfold.distill.teacher import BatchTargets
from enfold.engines.initialization import initialize_member
from enfold.ensemble import Ensemble
from enfold.evaluate import best_member
from enfold.tasks import Classification


def best(members: Ensemble, data: Data) -> nn.Module:
    """Return the best member on validation data."""
    return members.member(best_member(members, data))


def fresh(members: Ensemble, seed: int = 0) -> nn.Module:
    """Return a network of the members' architecture with random weights, as init="random" makes it."""
    return initialize_member(members.member(0), seed, -1, trained=True)[0]


class FixedTeacher:
    """A teacher with given targets for every batch."""

    models = None

    def __init__(self, target) -> None:
        self.target = target

    def batch_targets(self, batch, generator=None) -> BatchTargets:
        return BatchTargets(self.target(batch) if callable(self.target) else self.target, Classification())
