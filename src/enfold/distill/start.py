"""Students: which network learns, as one network or as a share, and from which weights it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

from enfold.data import Data
from enfold.engines.initialization import initialised
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.common.sharing import Share
from enfold.ensembles.rank_one import match_units, reconstruct
from enfold.errors import EnfoldError
from enfold.evaluate import best_member
from enfold.merge.common.inputs import first_inputs, require_members
from enfold.train.batch_norm import reestimate

Start = Literal["member", "fresh", "average", "matched", "als"]
"""The best member on validation data; a network never trained; the members' mean, as they are or with hidden units
matched first; or, for a BatchEnsemble, the one nearest to the members by alternating least squares."""


def begin(
    teacher: object,
    data: Data,
    start: Start,
    seed: int,
    make: Callable[[], nn.Module] | None = None,
    share: Share | None = None,
) -> nn.Module:
    """The student before its training; what it starts from is left untouched."""
    if make is not None:
        network = initialised(make, seed, -1)[0]
        return network if share is None else share(network)
    members = require_members(teacher, "a student of the members' own class")
    if start == "als":
        return _nearest(members, data, share)
    network = _network(members, data, start, seed)
    return network if share is None else share(network)


def _network(members: Ensemble, data: Data, start: Start, seed: int) -> nn.Module:
    if start == "fresh":
        return initialised(members.member(0), seed, -1, trained=True)[0]
    if start == "member":
        return members.member(best_member(members, data))
    if start == "matched":
        members = match_units(members, example=first_inputs(data), seed=seed)
    network = members.network(members.mean_state())
    reestimate(network, data)
    return network


def _nearest(members: Ensemble, data: Data, share: Share | None) -> nn.Module:
    if not isinstance(share, BatchEnsemble):
        given = "one network" if share is None else type(share).__name__
        raise EnfoldError(
            f"a start by alternating least squares is a BatchEnsemble's, got {given}: use share: "
            "batch_ensemble, or another start"
        )
    student = reconstruct(members, share).members
    student.reestimate_batch_norm(data)
    return student
