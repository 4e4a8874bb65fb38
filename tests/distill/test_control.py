"""The control: the best member, trained on by the same plan with the labels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.data import Data
from enfold.distill.control import train_control
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import predict
from enfold.metrics import nll, per_member
from enfold.train import TrainConfig, fit

PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02, label_smoothing=0.1, order="shared")


@pytest.fixture
def data() -> Data:
    return three_clouds(40, 30, 30)


@pytest.fixture
def members(data) -> DeepEnsemble:
    """Members of which only number 2 is trained and so is the best."""
    made = DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), 4)
    networks = made.networks()
    fit(networks[2], data, config=PLAN.replace(epochs=10), quiet=True)
    return DeepEnsemble(networks)


def test_it_starts_from_the_best_member_on_validation_data(members, data):
    assert int(per_member(nll, predict(members, data.val)).argmin()) == 2
    network = train_control(members, data, config=PLAN.replace(epochs=0))
    assert torch.equal(network[0].weight, members.member(2)[0].weight)


def test_the_control_is_the_best_member_trained_further(members, data):
    expected = members.member(2)
    fit(expected, data, config=PLAN, quiet=True)
    network = train_control(members, data, config=PLAN)
    assert type(network) is nn.Sequential
    assert all(torch.equal(one, other) for one, other in zip(network.parameters(), expected.parameters(), strict=True))
    assert not torch.equal(network[0].weight, members.member(2)[0].weight)


def test_members_and_the_test_split_are_not_used(members, data):
    before = {name: tensor.clone() for name, tensor in members.state_dict().items()}
    network = train_control(members, data.replace(test=iter(())), config=PLAN)
    assert all(torch.equal(before[name], tensor) for name, tensor in members.state_dict().items())
    assert not network.training


def test_training_resumes_from_a_checkpoint(members, data, tmp_path):
    file = tmp_path / "control.safetensors"
    first = train_control(members, data, config=PLAN, checkpoint=file)
    again = train_control(members, data, config=PLAN, checkpoint=file)
    assert file.exists()
    assert torch.equal(first[0].weight, again[0].weight)


def test_different_architectures_have_no_control(data):
    with pytest.raises(EnfoldError, match="got a MixedEnsemble"):
        train_control(MixedEnsemble([nn.Linear(4, 3)]), data, config=PLAN)


def test_a_control_that_returns_its_start_gives_a_warning(members, data):
    with pytest.warns(UnchangedWarning, match="member 2"):
        network = train_control(members, data, config=PLAN.replace(lr=50.0))
    assert torch.equal(network[0].weight, members.member(2)[0].weight)
