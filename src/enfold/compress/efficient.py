"""Ensembles that `compress` tries for budgets of more than one pass: fewer members, or less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from enfold.compress.limits import ROUNDING
from enfold.compress.routes import Route, Setting
from enfold.distill.losses.hydra import Hydra
from enfold.distill.losses.one_to_one import OneToOne
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.engines.copying import copy_network
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.metrics import metrics_for
from enfold.metrics.predictions import RowPredictions

SPREAD = 0.1  # of the factors of a BatchEnsemble around 1: members start near the best member


def find_ensembles(setting: Setting, found: RowPredictions, *, expensive: bool = False) -> Iterator[Route]:
    """Yield the ensembles that may meet budgets of more than one pass, most promising first.

    Args:
        setting: The members and the data.
        found: Predictions of the members for the validation examples.
        expensive: Whether to include perturbations that take several times as long.
    """
    members = setting.members
    if not members.is_expandable or setting.students or setting.budget <= ROUNDING:
        return
    passes = min(int(setting.budget * ROUNDING), members.num_members)
    number = min(passes, int(min(setting.memory, 1e9) * ROUNDING))
    if isinstance(members, DeepEnsemble) and 2 <= number < members.num_members:
        yield from _fewer_members(members, best_subset(found, number))
    if passes >= 2 and setting.memory < passes:
        yield from _batch_ensembles(setting, passes, expensive)
    if setting.task.is_categorical:
        blank = partial(_hydra, setting)
        idea = "one body, a head for each member"
        start = setting.best_member()
        yield Route("hydra", idea, "ensemble", loss=Hydra(), init=start, blank=blank, effort=1.5)


def _fewer_members(members: DeepEnsemble, chosen: list[int]) -> Iterator[Route]:
    """Yield the best members, and students that start from them."""
    make = partial(_members_of, members, chosen)
    name, count = "best members" if len(chosen) > 1 else "best member", len(chosen)
    yield Route(f"{count} {name}", "those with the best joint prediction", "ensemble", make=make, blank=make)
    idea = "each learns the ensemble's predictions from a member on"
    yield Route(f"{count} distilled members", idea, "ensemble", student=make, effort=1 + count / 2)


def _batch_ensembles(setting: Setting, passes: int, expensive: bool) -> Iterator[Route]:
    """Yield BatchEnsembles, whose members have most weights in common."""
    is_complete = passes == setting.members.num_members
    make = partial(_batch_ensemble, setting, passes)
    effort = 1 + passes / 2
    idea = "members with common weights, each learns from a member" if is_complete else "members with common weights"
    route = Route("batch ensemble", idea, "ensemble", student=make, effort=effort)
    yield replace(route, loss=OneToOne()) if is_complete else route
    if expensive and is_complete and setting.task.is_categorical:
        more = "and where teachers differ, students not yet"
        name = "batch ensemble + TDiv-SDiv"
        yield replace(route, name=name, idea=more, loss=OneToOne(), perturb=TDivSDiv(), effort=2.5 * effort)


def best_subset(found: RowPredictions, number: int) -> list[int]:
    """Return the members whose mean prediction is best, chosen one after the other.

    Args:
        found: Predictions of all members.
        number: How many are chosen.
    """
    criterion = metrics_for(found)[found.criterion]
    chosen: list[int] = []
    while len(chosen) < number:
        rest = [index for index in range(found.num_members) if index not in chosen]
        chosen.append(min(rest, key=lambda index: criterion(found.subset([*chosen, index]))))
    return sorted(chosen)


def _members_of(members: DeepEnsemble, chosen: list[int]) -> nn.Module:
    few = members[chosen]
    few.task = members.task
    copied: nn.Module = copy_network(few)
    return copied


def _batch_ensemble(setting: Setting, passes: int) -> Ensemble:
    return BatchEnsemble(setting.best_member(), passes, spread=SPREAD, seed=setting.config.seed)


def _hydra(setting: Setting) -> Ensemble:
    return HydraEnsemble(setting.best_member(), setting.members.num_members, seed=setting.config.seed)
