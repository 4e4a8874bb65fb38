"""Where students start, and which arguments are refused before anything is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold import Gaussian
from enfold.distill import distill
from enfold.distill.losses.kd import KD
from enfold.distill.losses.one_to_one import OneToOne
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one import match_units, reconstruct
from enfold.errors import EnfoldError
from enfold.merge import average
from enfold.train import TrainConfig
from students import best, fresh

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
NOTHING = TrainConfig(epochs=0)


def same(one: nn.Module, other: nn.Module) -> None:
    expected = dict(other.state_dict())
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_network_given_as_init_is_copied(members, data, snapshot):
    network = average(members, data)
    unchanged = snapshot(network)
    student = distill(members, data, init=network, config=NOTHING)
    same(student, network)
    assert student is not network
    distill(members, data, init=network, epochs=1, select="last")
    assert unchanged()


def test_permuted_copies_average_to_the_original_when_matched(members, data):
    """One network in four orders of its hidden units."""
    network = members.member(0)
    copies = []
    for seed in range(4):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        other = members.member(0)
        with torch.no_grad():
            other.inner.weight.copy_(network.inner.weight[order])
            other.inner.bias.copy_(network.inner.bias[order])
            other.head.weight.copy_(network.head.weight[:, order])
            for name in ("weight", "bias", "running_mean", "running_var") if hasattr(network, "norm") else ():
                getattr(other.norm, name).copy_(getattr(network.norm, name)[order])
        copies.append(other)
    copies = DeepEnsemble(copies)
    start = average(match_units(copies, example=data.train.inputs[:2]), data)
    student = distill(copies, data, init=start, config=NOTHING)
    torch.testing.assert_close(student.head.weight.sort(1).values, network.head.weight.sort(1).values)


def test_the_best_member_a_random_network_and_the_first_member(members, data):
    same(distill(members, data, config=NOTHING), best(members, data))
    same(distill(members, data, init="random", config=NOTHING), fresh(members))
    pair = (data.train.inputs, data.train.labels)
    same(distill(members, pair, config=NOTHING), members.member(0))
    same(distill(members.member(2), data, config=NOTHING), members.member(2))
    same(distill(members.networks(), data, config=NOTHING), best(members, data))


def test_an_ensemble_starts_from_each_of_them(members, data, snapshot):
    for network in (best(members, data), fresh(members), average(members, data)):
        given = BatchEnsemble(network, 3, init="ones")
        unchanged = snapshot(given)
        student = distill(members, data, student=given, config=NOTHING)
        same(student.member(2), network)
        distill(members, data, student=given, epochs=1, select="last")
        assert unchanged()


def test_the_nearest_batch_ensemble(members, data):
    nearest = reconstruct(members, sweeps=20)
    student = distill(members, data, student=nearest, loss=OneToOne(), config=NOTHING)
    same(student, nearest)


def test_a_weight_penalty_moves_members_towards_their_teachers(members, data):
    plan = TrainConfig(epochs=8, batch_size=16, lr=0.02, optimizer="adam", weight_decay=0.0, select="last")
    distances, start = [], BatchEnsemble(average(members, data), 4)
    for strength in (0.0, 1.0):
        student = distill(members, data, student=start, loss=OneToOne(), weight_penalty=strength, config=plan)
        own, target = student.expand(), members.expand()
        gaps = [(own[name] - target[name]).detach() for name in ("inner.weight", "head.weight")]
        distances.append(sum(float(gap.square().sum()) for gap in gaps))
    assert distances[1] < distances[0]


def test_a_factory_gives_the_students_weights(members, data):
    def make() -> nn.Module:
        return nn.Linear(4, 3)

    one, other = (distill(members, data, student=make, init=init, config=NOTHING) for init in (None, "random"))
    same(one, other)
    with pytest.raises(EnfoldError, match="init"):
        distill(members, data, student=make, init=members.member(0), config=NOTHING)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_penalty": -1.0}, "weight_penalty .* got -1.0"),
        ({"weight_penalty": 0.1}, "weight_penalty .* 4 teachers and 1 students"),
        ({"penalty_reduction": "max"}, "penalty_reduction .* got 'max'"),
        ({"config": {"epochs": 1}}, "config must be a TrainConfig"),
        ({"student": nn.Linear(4, 3)}, "student .* got Linear"),
        ({"student": "hydra"}, "student .* got str"),
        ({"init": "warm"}, "init .* got 'warm'"),
        ({"init": 0}, "init .* got 0"),
        ({"perturb": 3}, "perturb .* got 3"),
        ({"perturb": "conf_ods"}, "perturb .* got 'conf_ods'"),
        ({"perturb": Gaussian}, "perturb .* got"),
        ({"loss": "kd"}, "loss .* got 'kd'"),
        ({"loss": KD}, "loss .* got"),
        ({"epoch": 3}, "epoch"),
    ],
)
def test_invalid_arguments(members, data, settings, message):
    with pytest.raises(EnfoldError, match=message):
        distill(members, data, **settings)


def test_an_ensemble_student_has_no_init(members, data):
    ensemble = BatchEnsemble(members.member(0), 4)
    with pytest.raises(EnfoldError, match=r"init .* student="):
        distill(members, data, init=ensemble)
    for init in ("random", members.member(0)):
        with pytest.raises(EnfoldError, match="init"):
            distill(members, data, student=ensemble, init=init)


class Frame:
    """Looks like a DataFrame."""

    iloc = None


@pytest.mark.parametrize("train", [None, Frame(), "mnist", {"x": 1}, (torch.zeros(3, 4),) * 3, 7])
def test_data_of_the_wrong_kind(members, train):
    with pytest.raises(EnfoldError, match="train"):
        distill(members, train)


@pytest.mark.parametrize("teacher", [None, "kd", 3, [], [1, 2], torch.zeros(4, 40, 3)])
def test_a_teacher_of_the_wrong_kind(data, teacher):
    with pytest.raises(EnfoldError, match="teacher"):
        distill(teacher, data)


def test_any_loader(members, data):
    """Tensors, arrays, a Dataset and a DataLoader give the same student as the data set, but for the order."""
    from torch.utils.data import DataLoader, TensorDataset

    x, y = data.train.inputs, data.train.labels
    plan = TrainConfig(epochs=1, batch_size=40, select="last", optimizer="sgd", lr=0.01)
    plain = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
    expected = distill(plain, data, config=plan)
    val = (data.val.inputs.numpy(), data.val.labels.numpy())
    for train in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=40)):
        student = distill(plain, train, val, config=plan)
        for one, other in zip(student.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_weight_penalty_is_between_equal_numbers(members, data):
    with pytest.raises(EnfoldError, match="got 4 teachers and 3 students"):
        distill(members, data, student=BatchEnsemble(members.member(0), 3), weight_penalty=0.1, config=NOTHING)
