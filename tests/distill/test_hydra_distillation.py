"""Hydra distillation: two stages, heads initialised from the first, and an optionally frozen body."""

from __future__ import annotations

import pytest
import torch

from enfold.data import Data
from enfold.distill import distill
from enfold.distill.losses.hydra import Hydra
from enfold.distill.losses.kd import KD
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.train import TrainConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore::enfold.train.diversity.LowDiversityWarning"
)  # a few epochs on forty points
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02, select="last")


def test_copies_without_noise_agree_with_the_hinton_head(members, data: Data):
    heads = distill(members, data, loss=Hydra(noise=0.0, temperature=2.0, first_epochs=3), config=PLAN, epochs=0)
    one = distill(members, data, loss=KD(temperature=2.0), init="random", config=PLAN)
    for logits in heads(data.test.inputs):
        torch.testing.assert_close(logits, one(data.test.inputs))


@pytest.mark.slow
def test_each_head_approaches_its_own_teacher(members, data: Data):
    plan = PLAN.replace(epochs=30, select="last")
    heads = distill(members, data, loss=Hydra(first_epochs=5), config=plan)
    said, taught = predict(heads, data.train).log_probs, predict(members, data.train).log_probs
    distance = (taught.exp()[:, None] * (taught[:, None] - said[None])).sum(-1).mean(-1)  # (teacher, head)
    assert heads.num_members == members.num_members
    assert distance.diagonal().mean() < (distance.sum() - distance.trace()) / (distance.numel() - len(distance))


def test_a_frozen_body_gives_independent_problems(members, data: Data):
    """The body stays, and a head does not depend on what the other heads are taught."""
    config = PLAN.replace(select="last", optimizer="sgd", weight_decay=0.0)
    loss = Hydra(body="frozen", noise=0.2)
    network = distill(members, data, init="random", config=config)
    start = HydraEnsemble(network, 4, noise=0.2)
    others = DeepEnsemble([members.member(0), *[members.member(1)] * 3])
    heads, others = (distill(each, data, loss=loss, init=network, config=config) for each in (members, others))
    assert all(parameter.requires_grad for parameter in heads.parameters())
    for name, tensor in start.shared.named_parameters():
        assert torch.equal(tensor, dict(heads.shared.named_parameters())[name])
    own, beside = dict(heads.own.named_parameters()), dict(others.own.named_parameters())
    for name, tensor in start.own.named_parameters():
        assert not torch.equal(tensor, own[name])
        torch.testing.assert_close(own[name][:2], beside[name][:2])
        assert not torch.allclose(own[name][2:], beside[name][2:])


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_training_resumes_in_either_stage(members, data: Data, tmp_path):
    file = tmp_path / "hydra.safetensors"
    expected = distill(members, data, loss=Hydra(), config=PLAN).state_dict()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Hydra, "build_student", stop)
        with pytest.raises(KeyboardInterrupt):
            distill(members, data, loss=Hydra(), config=PLAN, checkpoint=file)
    assert [each.name for each in tmp_path.iterdir()] == ["hydra-first.safetensors"]
    for _ in range(2):
        again = distill(members, data, loss=Hydra(), config=PLAN, checkpoint=file).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in expected.items())


def test_a_network_given_as_init_is_the_hinton_head(members, data: Data):
    """The first stage is left out: the caller did it."""
    network = members.member(1)
    heads = distill(members, data, loss=Hydra(noise=0.0), init=network, config=PLAN, epochs=0)
    torch.testing.assert_close(heads(data.test.inputs)[2], network.eval()(data.test.inputs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"body": "melted"}, "body .* got 'melted'"), ({"first_epochs": -1}, "first_epochs .* got -1")],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        Hydra(**settings)


def test_the_student_is_built_by_the_loss(members, data: Data):
    with pytest.raises(EnfoldError, match=r"Hydra.* got a BatchEnsemble"):
        distill(members, data, loss=Hydra(first_epochs=0), student=BatchEnsemble(members.member(0), 4), config=PLAN)
