"""Weight penalty: any objective, plus the squared distance of a student's weights to its teachers', member by member.

    L_m = objective_m + λ Σ_layers || W_m - W_m^teacher ||²                                            (1)

The published strengths are λ = 0.01, 0.1 and 1. Whether the norm is a sum or a mean over weights is not published, so
both are offered. No gain over distillation without the penalty was reported.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.batches import Batch
from enfold.data.dataset import Part
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.io.files import digest
from enfold.train.objective import ByBatch, HasDivergence, Objective, StepContext

Reduction = Literal["sum", "mean"]


@checked
@dataclass(frozen=True)
class WeightPenalty:
    """Equation (1) as an objective of `fit`.

    The student is an ensemble with as many members and the same layers. Penalised are the weights of linear,
    convolution and embedding layers: all parameters called `weight` with at least two axes.

    Args:
        objective: The objective without the penalty.
        models: The teacher; its weights are copied.
        strength: λ.
        reduction: Sum or mean over the weights of a layer; layers are summed.
    """

    objective: Objective
    models: Ensemble = field(repr=False)
    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    reduction: Reduction = "sum"
    targets: State = field(init=False, repr=False, compare=False)
    teacher: str = field(init=False)  # a digest of the targets: a checkpoint belongs to one teacher

    def __post_init__(self) -> None:
        if not isinstance(self.models, Ensemble):
            raise EnfoldError(
                f"weight_penalty needs a teacher of networks of one architecture, got {type(self.models).__name__}: "
                "pass a DeepEnsemble"
            )
        with torch.no_grad():
            state = self.models.expand()
        targets = {
            name: stacked.detach().clone()
            for name, stacked in state.items()
            if name.rpartition(".")[2] == "weight" and stacked.ndim > 2  # the first axis is the member
        }
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "teacher", digest(targets.values())[:16])

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        if not self.strength:
            return self.objective(model, batch)
        distances = self.distances(model)
        losses = self.objective(model, batch)
        return losses + self.strength * distances.to(losses.device)  # (1)

    def for_batch(self, model: nn.Module, batch: Batch, context: StepContext) -> Objective:
        """Return the penalty with the objective of this batch.

        Args:
            model: The students.
            batch: The batch.
            context: Epoch, progress and seed of the step.
        """
        if not isinstance(self.objective, ByBatch):
            return self
        prepared = copy.copy(self)  # not replace(), which would copy the weights again
        object.__setattr__(prepared, "objective", self.objective.for_batch(model, batch, context))
        return prepared

    def divergence(self, model: nn.Module, part: Part) -> list[float]:
        """Return the divergence of each member from its teacher, without the penalty."""
        if not isinstance(self.objective, HasDivergence):
            raise EnfoldError("val must have targets, got inputs only: pass targets, or val=None")
        return self.objective.divergence(model, part)

    def distances(self, model: nn.Module) -> Tensor:
        """Return the squared distance of each member's weights to its teacher's, (M,), differentiable."""
        if not isinstance(model, Ensemble) or not model.is_expandable:
            raise EnfoldError(
                f"weight_penalty compares members with their teachers, got a {type(model).__name__} as the student: "
                "pass an ensemble as student="
            )
        state, terms = model.expand(), []
        for name, target in self.targets.items():
            shape = tuple(state[name].shape) if name in state else None
            if shape != tuple(target.shape):
                raise EnfoldError(
                    f"weight_penalty needs a student with the teacher's layers and members, but '{name}' is {shape} "
                    f"instead of {tuple(target.shape)}: use the same network and number of members"
                )
            if target.device != state[name].device:
                target = self.targets[name] = target.to(state[name].device)  # moved once, not in every step
            squares = (state[name] - target).square().flatten(1)
            terms.append(squares.sum(1) if self.reduction == "sum" else squares.mean(1))
        return torch.stack(terms).sum(0)
