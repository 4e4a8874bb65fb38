"""Outputs that are not the logits of classes are refused by name, not averaged over some axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold import Data, Mixed, Plan, Split, Stacked, evaluate, fit
from enfold.errors import EnfoldError
from enfold.train.objective import batch_logits

NETWORKS = {
    "dense": (lambda: nn.Conv2d(1, 3, 3, padding=1), (1, 8, 8)),
    "tokens": (lambda: nn.Linear(4, 3), (5, 4)),
    "one output": (lambda: nn.Linear(4, 1), (4,)),
    "no axis of classes": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (4,)),
}


def data_of(shape: tuple[int, ...]) -> Data:
    inputs, labels = torch.randn(12, *shape), torch.zeros(12, dtype=torch.long)
    return Data(Split(inputs, labels), Split(inputs + 1, labels), Split(inputs + 2, labels), 1, shape)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", [Stacked, Mixed])
def test_forward_mean_and_evaluation_refuse_them(name, kind):
    make, shape = NETWORKS[name]
    members = kind([make() for _ in range(3)])
    with pytest.raises(EnfoldError, match="classes"):
        members.forward_mean(torch.randn(4, *shape))
    with pytest.raises(EnfoldError, match="classes"):
        evaluate(members, data_of(shape))
    assert members(torch.randn(4, *shape)).shape[:2] == (3, 4), "the members' own outputs are there"


@pytest.mark.parametrize("name", NETWORKS)
def test_so_does_training_by_cross_entropy(name):
    make, shape = NETWORKS[name]
    members = Stacked([make() for _ in range(2)])
    with pytest.raises(EnfoldError, match="classes"):
        fit(members, data_of(shape).replace(validation=[]), Plan(epochs=1), quiet=True)


def test_an_objective_of_the_users_own_may_take_one_output():
    make, shape = NETWORKS["one output"]
    members = Stacked([make() for _ in range(2)])
    history = fit(
        members,
        data_of(shape).replace(validation=[]),
        Plan(epochs=1),
        lambda model, batch: batch_logits(model, batch).square().mean((1, 2)),
        quiet=True,
    )
    assert len(history.epochs) == 1
