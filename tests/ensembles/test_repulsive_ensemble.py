"""Repulsive ensembles: the gradient is the published update, in both spaces, and members are pushed apart."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import enfold
from clouds import three_clouds
from enfold.data.batches import Batch
from enfold.ensembles.repulsive_ensemble import RepulsiveEnsemble, _squared_distances, log_density
from enfold.errors import EnfoldError
from enfold.metrics import pairwise_kl
from enfold.networks import MLP
from enfold.train import TrainConfig, fit

PLAN = TrainConfig(epochs=4, batch_size=20, lr=0.02, optimizer="sgd", weight_decay=0.0)
DATA = three_clouds(60, 30, 60)


def network() -> nn.Module:
    torch.manual_seed(0)
    return MLP(4, [5], 3)


def quotient(points: Tensor) -> Tensor:
    """Σ_j ∇_ui k(u_i, u_j) / Σ_j k(u_i, u_j), from the derivative of the kernel, member by member."""
    count = len(points)
    distances = torch.stack([torch.stack([(a - b).square().sum() for b in points]) for a in points])
    gamma = math.log(count + 1) / float(distances.flatten().quantile(0.5))
    found = []
    for i in range(count):
        kernel = torch.exp(-gamma * distances[i])
        slopes = torch.stack([-2 * gamma * (points[i] - points[j]) * kernel[j] for j in range(count)])
        found.append(slopes.sum(0) / kernel.sum())
    return torch.stack(found)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_gradient_of_the_log_density_is_the_published_quotient(count):
    points = torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_density(points).sum().backward()
    torch.testing.assert_close(points.grad, quotient(points.detach()))


def test_distances_from_products_are_those_of_differences():
    points = torch.randn(5, 9, dtype=torch.float64)
    torch.testing.assert_close(_squared_distances(points), torch.cdist(points, points).square())


@pytest.mark.parametrize("space", ["function", "weights"])
def test_a_step_is_the_published_update(space):
    members = RepulsiveEnsemble(network(), 3, space=space, strength=2.0)
    size, step = 60, PLAN.replace(epochs=1, batch_size=60, momentum=0.0, nesterov=False, schedule="constant", lr=0.5)
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in members.expand().items()}
    order = torch.arange(size)

    def outputs(index: int) -> Tensor:
        own = {name: tensor[index] for name, tensor in state.items()}
        return torch.func.functional_call(network(), own, (DATA.train.inputs,))

    each = torch.stack([outputs(index) for index in range(3)])
    losses = torch.stack([F.cross_entropy(logits, DATA.train.labels) for logits in each])
    points = each.flatten(1) if space == "function" else torch.cat([t.flatten(1) for t in state.values()], 1)
    push = (points * quotient(points.detach())).sum()  # its gradient in θ is the repulsion of (1)
    grads = torch.autograd.grad(losses.sum() + 2.0 / size * push, list(state.values()))
    fit(members, DATA.replace(val=[]), config=step, quiet=True)
    for (name, before), grad in zip(state.items(), grads, strict=True):
        torch.testing.assert_close(members.expand()[name].detach(), before.detach() - 0.5 * grad, rtol=1e-4, atol=1e-6)
    assert len(order) == size


@pytest.mark.parametrize("space", ["function", "weights"])
def test_members_are_pushed_apart(space):
    found = []
    for strength in (0.0, 30.0):
        members = RepulsiveEnsemble(network(), 3, space=space, strength=strength)
        fit(members, DATA, config=PLAN, quiet=True)
        points = torch.cat([tensor.flatten(1) for tensor in members.expand().values()], 1).detach()
        spread = (
            float(torch.pdist(points).mean()) if space == "weights" else pairwise_kl(enfold.predict(members, DATA.test))
        )
        found.append(spread)
    assert found[1] > 1.05 * found[0]


def test_without_strength_it_is_a_deep_ensemble():
    members = RepulsiveEnsemble(network(), 2, strength=0.0)
    deep = enfold.DeepEnsemble(members.networks())
    fit(members, DATA, config=PLAN, quiet=True)
    fit(deep, DATA, config=PLAN.replace(order="shared", select="last"), quiet=True)
    for name, tensor in members.expand().items():
        torch.testing.assert_close(tensor, deep.expand()[name], rtol=1e-4, atol=1e-5)


def test_equal_members_do_not_move_and_one_member_has_no_repulsion():
    assert log_density(torch.ones(3, 4)).tolist() == [0.0, 0.0, 0.0]
    members = RepulsiveEnsemble(network(), 1)
    batch = Batch(DATA.train.inputs, DATA.train.labels)
    expected = F.cross_entropy(members(batch.inputs)[0], batch.targets)
    torch.testing.assert_close(members.objective(PLAN)(members, batch)[0], expected)


def test_a_loader_counts_its_examples_by_batches():
    members = RepulsiveEnsemble(network(), 2)
    dataset = torch.utils.data.TensorDataset(DATA.train.inputs, DATA.train.labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    fit(members, loader, epochs=1, quiet=True)
    assert members.examples == [3, True]
    with pytest.raises(EnfoldError, match="length"):
        fit(members, (batch for batch in loader), epochs=1, quiet=True)


@pytest.mark.parametrize("settings", [{"bootstrap": True}, {"folds": 2}, {"order": "split"}, {"patience": 1}], ids=str)
def test_settings_of_separate_members_are_refused(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        fit(RepulsiveEnsemble(network(), 2), DATA, epochs=1, quiet=True, **settings)
