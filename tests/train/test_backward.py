"""Gradients member by member equal those of the sum of all losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data.batches import Batch, Order
from enfold.ensemble import MemberView
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import cross_entropy
from enfold.train.backward import Separable, backward


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("network", ["mlp", "normed", "convolutional"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("smoothing", [0, [0.0, 0.3, 0.5]])
def test_members_one_by_one_equal_all_together(data, images, make, network, own, smoothing):
    data = images if network == "convolutional" else data
    batch = next(Order(16, range(3) if own else None).batches(data, 0))
    objective = cross_entropy(smoothing)
    one_by_one, at_once = (DeepEnsemble(make[network], 3, engine="loop") for _ in range(2))
    losses = backward(one_by_one, batch, objective)
    expected = objective(at_once, batch)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach())
    assert not losses.requires_grad
    for found, wanted in zip(gradients(one_by_one), gradients(at_once), strict=True):
        torch.testing.assert_close(found, wanted)
    for name, tensor in one_by_one.expand().items():  # batch norms have seen the same
        torch.testing.assert_close(tensor, at_once.expand()[name])


def test_an_objective_over_all_members_is_not_split(data, make):
    """One without `member` may depend on all of them."""
    seen = []

    def spread(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model.forward_each(batch.inputs)
        seen.append(logits.shape[0])
        return (logits - logits.mean(0)).square().mean(dim=(1, 2))

    members = DeepEnsemble(make["mlp"], 3, engine="loop")
    losses = backward(members, next(Order(16, range(3)).batches(data, 0)), spread)
    assert seen == [3]
    assert losses.shape == (3,)
    assert not isinstance(spread, Separable)


def test_gradients_are_scaled_and_added(data, make):
    members = DeepEnsemble(make["mlp"], 2, engine="loop")
    batch = next(Order(16, range(2)).batches(data, 0))
    backward(members, batch, cross_entropy())
    once = gradients(members)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(members, batch, cross_entropy(), torch.autocast("cpu", enabled=False), scaler)
    for found, single in zip(gradients(members), once, strict=True):
        torch.testing.assert_close(found, 5 * single)


def test_a_view_of_one_member(data, make):
    members = DeepEnsemble(make["mlp"], 3)
    view = MemberView(members.skeleton, {name: tensor[1] for name, tensor in members.expand().items()})
    assert list(view.parameters()) == []
    torch.testing.assert_close(view(data.test.inputs)[0], members(data.test.inputs)[1])


@pytest.mark.parametrize("batch_norm", ["shared", "own"])
@pytest.mark.parametrize("own", [True, False])
def test_looped_efficient_ensembles_get_joint_gradients(own, batch_norm):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    members = BatchEnsemble(network, num_members=3, batch_norm=batch_norm, engine="loop").train()
    inputs = torch.randn(*((3,) if own else ()), 5, 3, 4, 4, dtype=torch.float64)
    batch = Batch(inputs, torch.randint(3, (3, 5) if own else (5,)), own)
    losses = backward(members, batch, cross_entropy())
    found = gradients(members)
    statistics = [buffer.clone() for buffer in members.buffers()]
    twin = BatchEnsemble(network, num_members=3, batch_norm=batch_norm, engine="loop").train()
    whole = cross_entropy()(twin, batch)
    whole.sum().backward()
    torch.testing.assert_close(losses, whole.detach())
    torch.testing.assert_close(found, gradients(twin))
    torch.testing.assert_close(statistics, list(twin.buffers()))
