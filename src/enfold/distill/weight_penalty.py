"""Tied: any objective, plus the squared distance between a student's weights and its teachers', member by member.

    L_m = objective_m + λ Σ_layers || W_m - W_m^teacher ||²                                                    (1)

The published strengths are λ = 0.01, 0.1 and 1; whether the norm is a sum or a mean over weights is not said, so both
are offered. No gain over distillation alone was reported.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.rank_one.blocks import member_layers
from enfold.errors import EnfoldError
from enfold.train.objective import ByBatch, Objective, StepContext

Reduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class Tied:
    """Equation (1), as an objective for `fit`; the layers are those that a BatchEnsemble scales.

    The student is any Ensemble with as many members and the same layers, such as `BatchEnsemble(M)(network)`. The
    teacher's weights are copied, so it may change or go away.
    """

    objective: Objective
    members: Ensemble = field(repr=False)  # the teacher
    strength: float
    reduction: Reduction = "sum"  # over the weights of a layer; layers are summed
    targets: State = field(init=False, repr=False, compare=False)
    teacher: str = field(init=False)  # a digest of the targets: a checkpoint belongs to one teacher

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise EnfoldError(
                f"the strength of a tie must be 0 or more, got {self.strength}: 0.01, 0.1 and 1 are usual"
            )
        if self.reduction not in get_args(Reduction):
            raise EnfoldError(
                f"the reduction must be one of {', '.join(get_args(Reduction))}, got {self.reduction!r}: "
                "sum is over all weights of a layer"
            )
        layers = member_layers(self.members)
        with torch.no_grad():
            state = self.members.expand()
            targets = {f"{prefix}weight": state[f"{prefix}weight"].detach().clone() for prefix in layers}
        digest = hashlib.sha256()
        for target in targets.values():
            digest.update(target.cpu().double().numpy().tobytes())
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "teacher", digest.hexdigest()[:16])

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each member, (M,)."""
        if not self.strength:
            return self.objective(model, batch)
        distances = self.distances(model)
        losses = self.objective(model, batch)
        return losses + self.strength * distances.to(losses.device)  # (1)

    def for_batch(self, model: nn.Module, batch: Batch, moment: StepContext) -> Objective:
        """The same tie with the objective that this batch makes."""
        if not isinstance(self.objective, ByBatch):
            return self
        tied = copy.copy(self)  # not replace(): the targets are there already
        object.__setattr__(tied, "objective", self.objective.for_batch(model, batch, moment))
        return tied

    def distances(self, model: nn.Module) -> Tensor:
        """How far each member's weights are from its teacher's, (M,), differentiable."""
        if not isinstance(model, Ensemble) or not model.is_expandable:
            raise EnfoldError(
                f"a tie is between members of one architecture, got a {type(model).__name__} as the student: "
                "use BatchEnsemble(M)(network), or DeepEnsemble"
            )
        state = model.expand()
        self._check(state)
        terms = []
        for name, target in self.targets.items():
            weight = state[name]
            if target.device != weight.device:
                target = self.targets[name] = target.to(weight.device)  # once, not in every step
            squares = (weight - target).square().flatten(1)
            terms.append(squares.sum(1) if self.reduction == "sum" else squares.mean(1))
        return torch.stack(terms).sum(0)

    def _check(self, state: State) -> None:
        for name, target in self.targets.items():
            shape = tuple(state[name].shape) if name in state else None
            if shape != tuple(target.shape):
                raise EnfoldError(
                    f"a tie needs a student with the teacher's layers and members, but '{name}' is {shape} instead of "
                    f"{tuple(target.shape)}: use the same network and number of members"
                )
