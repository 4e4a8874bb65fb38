"""Answers that several distillations have in common."""

import copy

import pytest
import torch
from torch import nn

import enfold
from enfold.distill.answers import Answers, shared_answers
from enfold.distill.losses.kd import KD

SETTINGS = {"epochs": 2, "batch_size": 20, "quiet": True, "select": "last"}


class Counted(nn.Linear):
    """A layer that counts its examples."""

    seen = 0

    def forward(self, inputs):
        Counted.seen += len(inputs)
        return super().forward(inputs)


@pytest.fixture
def train():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=source)
    return inputs, (inputs[:, 0] > 0).long()


def students(teacher, train):
    """Distil with and without labels, and for longer; the last is asked other questions."""
    start = nn.Linear(5, 2)
    with torch.no_grad():
        start.weight.zero_(), start.bias.zero_()
    common = {"perturb": enfold.Mixup(), "init": start, **SETTINGS}
    return [
        enfold.distill(teacher, train, **common),
        enfold.distill(teacher, train, loss=KD(alpha=0.5), **common),
        enfold.distill(teacher, train, **common | {"seed": 1}),
    ]


def test_students_are_the_same_and_batches_are_answered_once(train):
    torch.manual_seed(0)
    teacher = Counted(5, 2)
    Counted.seen = 0
    alone, answered = students(teacher, train), Counted.seen
    Counted.seen = 0
    with shared_answers(Answers()):
        together = students(teacher, train)
    assert Counted.seen <= answered - 2 * len(train[0])  # two epochs of the second student are known
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.weight, other.weight)
    assert not torch.equal(alone[0].weight, alone[2].weight)


def test_teachers_and_precisions_have_answers_of_their_own():
    answers, inputs = Answers(), torch.randn(4, 5)
    one, other = nn.Linear(5, 2), nn.Linear(5, 2)
    for network in (one, other, copy.deepcopy(one)):
        found = answers.find(network, inputs, lambda network=network: network(inputs).detach())
        assert torch.equal(found, network(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert answers.find(one, inputs, lambda: one(inputs).detach()).dtype == torch.bfloat16


def test_no_more_is_kept_than_allowed():
    answers = Answers(largest=100)
    for seed in range(5):
        inputs = torch.full((4, 5), float(seed))
        answers.find(nn.Identity(), inputs, inputs.clone)
    assert answers.bytes == 80
    assert len(answers.known) == 1
