"""Hydra by distillation: two steps, heads that start as the first one's, and a body that may be kept."""

from __future__ import annotations

import copy

import pytest
import torch

from enfold.data import Data
from enfold.distill import distill
from enfold.distill.losses.hydra import Hydra
from enfold.distill.losses.kd import KD
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.train import TrainConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore::enfold.train.diversity.LowDiversityWarning"
)  # a few epochs on forty points
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02, select="last")


def test_copies_without_noise_agree_with_the_hinton_head(members, data: Data):
    fold = HydraDistillation(noise=0.0, plan=PLAN, temperature=2.0)
    heads = fold.begin(members, data, None, None).eval()
    one = distill(members, data, loss=KD(temperature=2.0), config=PLAN, init="random")
    for logits in heads(data.test.inputs):
        torch.testing.assert_close(logits, one(data.test.inputs))


def test_each_head_comes_nearer_to_its_own_teacher(members, data: Data):
    plan = PLAN.replace(epochs=30, select="last")
    heads = distill(members, data, loss=Hydra(first_epochs=5), config=plan)
    said, taught = predict(heads, data.train).log_probs, predict(members, data.train).log_probs
    distance = (taught.exp()[:, None] * (taught[:, None] - said[None])).sum(-1).mean(-1)  # (teacher, head)
    assert heads.num_members == members.num_members
    assert distance.diagonal().mean() < (distance.sum() - distance.trace()) / (distance.numel() - len(distance))


def test_a_frozen_body_gives_each_head_a_problem_of_its_own(members, data: Data, monkeypatch):
    """The body stays, and a head does not depend on what the other heads are taught."""
    plan = PLAN.replace(select="last", optimizer="sgd", weight_decay=0.0)
    fold = HydraDistillation(body="frozen", plan=plan, noise=0.2)
    start = fold.begin(members, data, None, None)
    monkeypatch.setattr(HydraDistillation, "begin", lambda *_: copy.deepcopy(start))
    heads = fold(members, data)
    others = fold(DeepEnsemble([members.member(0), *[members.member(1)] * 3]), data)
    for name, tensor in start.shared.named_parameters():
        assert torch.equal(tensor, dict(heads.shared.named_parameters())[name])
    own, beside = dict(heads.own.named_parameters()), dict(others.own.named_parameters())
    for name, tensor in start.own.named_parameters():
        assert not torch.equal(tensor, own[name])
        torch.testing.assert_close(own[name][:2], beside[name][:2])
        assert not torch.allclose(own[name][2:], beside[name][2:])


def test_it_goes_on_from_either_step(members, data: Data, tmp_path):
    file = tmp_path / "hydra.safetensors"
    expected = distill(members, data, loss=Hydra(), config=PLAN).state_dict()
    HydraDistillation(plan=PLAN).begin(members, data, file, None)  # stopped after the first step
    assert [each.name for each in tmp_path.iterdir()] == ["hydra-first.safetensors"]
    for _ in range(2):
        again = distill(members, data, loss=Hydra(), config=PLAN, checkpoint=file).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": BatchEnsemble(2)}, "Hydra's student is a Hydra, got a BatchEnsemble"),
        ({"body": "melted"}, "body must be one of trained, frozen, got 'melted'"),
        ({"first_epochs": -1}, "first_epochs must be 0 or more, got -1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(EnfoldError, match=message):
        HydraDistillation(**settings)
