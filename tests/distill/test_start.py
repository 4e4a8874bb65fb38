"""Where students start: each start is what it says, leaves the members alone, and is refused where it cannot be."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from students import best, fresh
from enfold.data import Data
from enfold.distill import distill
from enfold.distill import start
from enfold.distill.losses.kd import KD
from enfold.distill.losses.one_to_one import OneToOne
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.ensembles.rank_one import match_units, reconstruct
from enfold.errors import EnfoldError
from enfold.merge import average
from enfold.train import TrainConfig

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
NOTHING = TrainConfig(epochs=0)


def begun(members, data: Data, **settings):
    return distill(members, data, config=NOTHING, **settings)


def same(one, other) -> None:
    expected = dict(other.state_dict())
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])


def test_the_average_and_the_matched_average(members, data):
    same(begun(members, data, start="average"), average(members, data))
    matched = begun(members, data, start="matched")
    same(matched, average(match_units(members, example=data.train.inputs[:2]), data))
    assert not torch.equal(matched.head.weight, begun(members, data, start="average").head.weight)


def test_copies_with_permuted_units_average_back_when_matched(members, data):
    """What tells the two averages apart: one network in four orders of its hidden units."""
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
    student = begun(DeepEnsemble(copies), data, start="matched")
    torch.testing.assert_close(student.head.weight.sort(1).values, network.head.weight.sort(1).values)


def test_a_share_starts_from_each_of_them(members, data):
    for place in ("member", "fresh", "average", "matched"):
        network = begun(members, data, start=place)
        share = begun(members, data, start=place, share=BatchEnsemble(3, init="ones"))
        same(share.member(2), network)


def test_the_nearest_batch_ensemble(members, data, monkeypatch):
    share, few_sweeps = BatchEnsemble(4), partial(reconstruct, sweeps=20)
    monkeypatch.setattr(start, "reconstruct", few_sweeps)
    student = distill(members, data, loss=OneToOne(), config=NOTHING, student=SHARE(share))
    nearest = few_sweeps(members, share).members
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter, dict(nearest.named_parameters())[name])
    if any("running_mean" in name for name in nearest.state_dict()):  # measured again after the weights changed
        changed = [n for n, t in student.state_dict().items() if not torch.allclose(t, nearest.state_dict()[n])]
        assert any("running" in name for name in changed)


@pytest.mark.parametrize(("share", "given"), [(None, "one network"), (Hydra(4), "Hydra")])
def test_least_squares_need_a_batch_ensemble(members, data, share, given):
    with pytest.raises(EnfoldError, match=f"is a BatchEnsemble's, got {given}: use share: batch_ensemble"):
        begun(members, data, start="als", share=share)


def test_a_tie_pulls_members_to_their_teachers(members, data):
    plan = TrainConfig(epochs=8, batch_size=16, lr=0.02, optimizer="adam", weight_decay=0.0, select="last")
    distances = []
    for tie in (0.0, 1.0):
        student = distill(members, data, loss=OneToOne(), config=plan, weight_penalty=tie, student=BatchEnsemble(best(members, data), 4))
        own, taught = student.expand(), members.expand()
        gaps = [(own[name] - taught[name]).detach() for name in ("inner.weight", "head.weight")]
        distances.append(sum(float(gap.square().sum()) for gap in gaps))
    assert distances[1] < distances[0]


def test_a_student_of_its_own_starts_fresh_and_nowhere_else(members, data):
    def make():
        return torch.nn.Linear(4, 3)

    for place in ("member", "average", "matched", "als"):
        with pytest.raises(EnfoldError, match=f"got start: {place}: use start: fresh, or leave student out"):
            KD(student=make, start=place)
    unsaid, said = (begun(members, data, student=make, **given) for given in ({}, {"start": "fresh"}))
    same(unsaid, said)
    assert (KD().begins, KD(student=make).begins) == ("member", "fresh")
    same(begun(members, data), begun(members, data, start="member"))
    with pytest.raises(EnfoldError, match="the start must be one of member, fresh, average, matched, als, got 'warm'"):
        KD(start="warm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tie": -1.0}, "tie must be 0 or more, got -1.0"),
        ({"tie": 0.1}, "got tie=0.1 and one network: give a share"),
        ({"share": "hydra"}, "share must be a Share, got 'hydra'"),
        ({"plan": {"epochs": 1}}, "plan must be a TrainConfig, got"),
        ({"student": torch.nn.Linear(4, 3)}, "student must be a function or class that makes a network"),
        ({"perturb": 3}, "a perturbation is a name or a mapping with method, got 3"),
        ({"perturb": "shake"}, "there is no perturb 'shake'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(EnfoldError, match=message):
        KD(**settings)


def test_a_tie_is_between_equal_numbers(members, data):
    with pytest.raises(EnfoldError, match="got 4 teachers and 3 students"):
        distill(members, data, weight_penalty=0.1, config=NOTHING, student=BatchEnsemble(best(members, data), 3))
