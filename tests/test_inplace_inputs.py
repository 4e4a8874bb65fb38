"""Networks that work in place on their inputs change neither the user's data nor what another network is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from enfold import (
    Data,
    DeepEnsemble,
    Split,
    TrainConfig,
    distill,
    evaluate,
    fit,
    measure,
    predict,
    symmetries,
    train_control,
)
from enfold.analysis.states import copy_state, predict_states
from enfold.cost import flops
from enfold.distill.perturb.ods import ODS
from enfold.merge import average
from enfold.train.batch_norm import reestimate

PLAN = TrainConfig(epochs=2, batch_size=8, lr=1e-2, select="last")


class Normalises(nn.Module):
    """It normalises its inputs itself, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs -= 0.5
        inputs /= 0.25
        return self.layers(inputs)


class Copies(Normalises):
    """The same on a copy."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.clone())


def pair() -> tuple[nn.Module, nn.Module]:
    writes, copies = Normalises(), Copies()
    copies.load_state_dict(writes.state_dict())
    return writes, copies


def make_data(*, lists: bool = False) -> Data:
    source = torch.Generator().manual_seed(0)

    def part() -> Split | list[tuple[Tensor, Tensor]]:
        inputs, labels = torch.rand(24, 6, generator=source), torch.randint(3, (24,), generator=source)
        return list(zip(inputs.split(8), labels.split(8), strict=True)) if lists else Split(inputs, labels)

    return Data(part(), part(), part(), 3, (6,))


def values(data: Data) -> list[Tensor]:
    parts = (data.train, data.val, data.test)
    return [inputs for part in parts for inputs in ([part.inputs] if isinstance(part, Split) else [x for x, _ in part])]


@pytest.fixture(params=[False, True], ids=["splits", "lists"])
def data(request):
    """Data that must be the same afterwards."""
    made = make_data(lists=request.param)
    before = [inputs.clone() for inputs in values(made)]
    yield made
    assert all(torch.equal(one, other) for one, other in zip(values(made), before, strict=True))


def test_evaluating_twice_gives_the_same(data):
    writes, copies = pair()
    scores = [evaluate(model, data).scores for model in (writes, writes, copies)]
    assert scores[0] == scores[1] == scores[2]
    rows = predict(writes, data.train, batch_size=5).log_probs
    torch.testing.assert_close(rows, predict(copies, data.train).log_probs)


def test_in_place_networks_give_equal_results(data):
    found = []
    for network in pair():
        fit(network, data, config=PLAN, quiet=True)
        reestimate(network, data)
        found.append(network.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("augment", [(), "perturb"], ids=["cached", "asked anew"])
def test_a_teacher_does_not_change_the_inputs_of_its_student(data, augment):
    perturb = ODS() if augment else None
    found = []
    for kind in range(2):
        torch.manual_seed(1)
        teacher, student = pair()[kind], pair()[kind]
        made = distill(teacher, data, student=lambda student=student: student, perturb=perturb, config=PLAN)
        found.append(made.state_dict())
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


def test_merges_and_controls_do_not_modify_data(data):
    before = [inputs.clone() for inputs in values(data)]
    members = DeepEnsemble([Copies() for _ in range(2)])
    average(members, data)
    train_control(members, data, config=PLAN)
    writes = DeepEnsemble([Normalises() for _ in range(2)])
    average(writes, data)
    assert all(torch.equal(one, other) for one, other in zip(values(data), before, strict=True))


def test_networks_along_a_path_have_the_same_inputs(data):
    writes, copies = pair()
    found = [predict_states(model, [copy_state(model)] * 3, data).log_probs for model in (writes, copies)]
    torch.testing.assert_close(found[0], found[1])


def test_members_are_trained_like_single_networks(data):
    writes, copies = zip(*(pair() for _ in range(2)), strict=True)
    found = []
    for networks in (writes, copies):
        members = DeepEnsemble(list(networks))
        fit(members, data, config=PLAN, quiet=True)
        found.append([*members.state_dict().values(), predict(members, data.test).log_probs])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_examples_are_not_modified():
    example, (writes, copies) = torch.rand(2, 6), pair()
    before = example.clone()
    found = [symmetries(model, example) for model in (writes, copies)]
    assert [group.name for group in found[0].groups] == [group.name for group in found[1].groups]
    assert flops(writes.eval(), example) == flops(copies.eval(), example)
    measure({"one": writes}, "one", example[0], batch_sizes=(1, 2), rounds=1, warmup=0)
    assert torch.equal(example, before)
