"""Compute the gradients of all members' losses, member by member where members run one after the other.

The losses are summed, so their gradients can be computed one member at a time: only one member's activations are
then in memory, which is also faster on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.engines.inputs import in_type_of
from enfold.engines.parameters import record_used
from enfold.engines.runner import MemberView
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.train.objective import Objective, StepContext

LossesOf = Callable[[nn.Module, Objective, Batch, int], Tensor]


@runtime_checkable
class Separable(Protocol):
    """An objective in which a member's loss depends on that member only."""

    def member(self, index: int) -> Objective:
        """Return the objective of one member."""


def backward(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    precision: AbstractContextManager[object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    noise: Sequence[int] = (),
    context: StepContext | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Add the gradients of the summed losses to the parameters' gradients and return the loss of each member, (M,).

    Args:
        model: A network or an ensemble.
        batch: The examples.
        objective: The losses.
        precision: Autocast context.
        scaler: Gradient scaler for float16.
        noise: Seeds of each member's random layers, such as dropout; members that run together use the first.
        context: The position in the training, for objectives that prepare batches.
        weight: Factor on the gradients, for a part of a batch.
    """
    prepare = getattr(objective, "for_batch", None)  # isinstance of a protocol takes longer than a small layer
    if prepare is not None:
        with precision or nullcontext():
            objective = prepare(model, batch, context or StepContext())

    def losses_of(part: nn.Module, own: Objective, seen: Batch, index: int) -> Tensor:
        if noise:
            torch.default_generator.manual_seed(noise[index])
        with precision or nullcontext():
            losses = own(part, seen)
        scaled = losses if scaler is None else scaler.scale(losses)
        scaled.backward(torch.full_like(scaled, weight))  # of their sum
        return losses.detach()

    if not isinstance(model, Ensemble) or not isinstance(objective, Separable) or not _by_member(model, batch):
        return losses_of(model, objective, batch, 0)
    with model.exclusive():  # no other thread may use the modules in which members run
        return _member_by_member(model, batch, objective, losses_of)


def _member_by_member(model: Ensemble, batch: Batch, objective: Separable, losses_of: LossesOf) -> Tensor:
    state, found = model.expand(), []
    gradients = Gradients(state)
    for index in range(model.num_members):
        view = MemberView(model.code(index), gradients.leaves(index))
        found.append(losses_of(view, objective.member(index), batch.member(index), index))
        gradients.store(index)
    gradients.apply()
    return torch.cat(found)


def _by_member(model: Ensemble, batch: Batch) -> bool:
    trains_all = model.is_expandable and model.trained_members == model.num_members
    return trains_all and model.is_looped(in_type_of(model, batch.inputs[0] if batch.own else batch.inputs))


class Gradients:
    """Gradients of stacked values, computed one member at a time and then propagated to the underlying parameters."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.found: State = {}
        self.current: State = {}
        self.unused: dict[str, set[int]] = {}  # members without a gradient where other members have one

    def leaves(self, index: int) -> State:
        """Return one member's values; those that require gradients start a graph of their own."""
        self.current = {
            name: tensor.detach()[index].requires_grad_() for name, tensor in self.state.items() if tensor.requires_grad
        }
        return {**{name: tensor[index] for name, tensor in self.state.items()}, **self.current}

    def store(self, index: int) -> None:
        """Store the member's gradients beside those of the others."""
        for name, leaf in self.current.items():
            if leaf.grad is None:
                self.unused.setdefault(name, set()).add(index)
                if name not in self.found:
                    continue  # what no member uses gets no gradient
            if name not in self.found:
                like = torch.empty_like if index == 0 else torch.zeros_like
                self.found[name] = like(self.state[name], requires_grad=False)
            self.found[name][index] = 0.0 if leaf.grad is None else leaf.grad.to_dense()

    def apply(self) -> None:
        """Propagate them to the parameters' gradients, and record for the optimizer which members use a parameter."""
        for name in self.unused.keys() & self.found.keys():
            stacked = self.state[name]
            if stacked.is_leaf:
                record_used(stacked, [index not in self.unused[name] for index in range(len(stacked))])
        torch.autograd.backward([self.state[name] for name in self.found], list(self.found.values()))
