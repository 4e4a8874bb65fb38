"""Gradients of all members' losses; member by member where members are run one after the other.

The losses are summed, so their gradients may be taken one member at a time: only one member's activations are then in
memory, which is also faster on a CPU (less memory to fetch from the system in every step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.evaluate import member_logits
from enfold.members import Stacked
from enfold.members.engines import Loop
from enfold.train.objective import Objective


@runtime_checkable
class Separable(Protocol):
    """An objective in which a member's loss depends on that member alone."""

    def member(self, index: int) -> Objective:
        """The objective of one member."""


class OneMember(nn.Module):
    """A view of one member, M = 1: gradients and batch-norm statistics end up in the members it is of."""

    num_members = 1

    def __init__(self, members: Stacked, index: int) -> None:
        super().__init__()
        self.of = (members, index)  # in a tuple, so that the members are not registered as a part of their part

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, ...) -> (1, B, C)."""
        members, index = self.of
        state = {name: tensor[index] for name, tensor in members.expand().items()}
        with members.skeleton.holding(state) as network:
            return member_logits(network, inputs)


def backward(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    precision: AbstractContextManager[object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    noise: Sequence[int] = (),
) -> Tensor:
    """The loss of each member, (M,), after adding the gradients of their sum to the parameters'.

    `noise` seeds what each member's layers draw, such as dropout; members that run at once take the first.
    """
    found = []
    for index, (part, own, seen) in enumerate(_parts(model, batch, objective)):
        if noise:
            torch.default_generator.manual_seed(noise[index])
        with precision or nullcontext():
            losses = own(part, seen)
        total = losses.sum()
        (total if scaler is None else scaler.scale(total)).backward()
        found.append(losses.detach())
    return torch.cat(found)


def _parts(model: nn.Module, batch: Batch, objective: Objective) -> Iterator[tuple[nn.Module, Objective, Batch]]:
    """The whole at once, or each member with its objective and what it sees."""
    if isinstance(model, Stacked) and isinstance(objective, Separable) and _is_looped(model, batch):
        for index in range(model.num_members):
            yield OneMember(model, index), objective.member(index), batch.member(index)
    else:
        yield model, objective, batch


def _is_looped(model: Stacked, batch: Batch) -> bool:
    return isinstance(model.engine(batch.inputs[0] if batch.own else batch.inputs), Loop)
