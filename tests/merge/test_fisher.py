"""Fisher merging, with gradients in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from enfold.data.convert import as_data
from enfold.errors import EnfoldError
from enfold.merge import average, fisher
from enfold.merge.fisher import information
from enfold.tasks import as_task
from enfold.tasks.regression import Regression
from fine_tuned import family, images, merged

INPUTS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(4, (20,), generator=torch.Generator().manual_seed(1))


def expected(layer: nn.Linear, targets: str) -> dict[str, torch.Tensor]:
    """The gradient of -log p(y) of a linear layer is (p - e_y) xᵀ."""
    probs = layer(INPUTS).softmax(1).detach()
    if targets == "labels":
        squares = (probs - one_hot(LABELS, 4)).square()
    else:
        squares = sum(probs[:, [y]] * (probs - torch.eye(4)[y]).square() for y in range(4))
    return {"weight": squares.T @ INPUTS.square() / 20, "bias": squares.mean(0)}


@pytest.mark.parametrize("targets", ["labels", "model"])
def test_the_information_of_a_linear_layer(targets):
    layer = nn.Linear(3, 4)
    found = information(layer, as_data((INPUTS, LABELS)), as_task(None), targets=targets, samples=None)
    for name, tensor in expected(layer, targets).items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.slow
def test_sampled_labels_have_the_exact_expectation():
    layer = nn.Linear(3, 4)
    found = information(layer, as_data((INPUTS, LABELS)), as_task(None), samples=400)
    torch.testing.assert_close(found["weight"], expected(layer, "model")["weight"], rtol=0.15, atol=0.01)


@pytest.mark.parametrize("targets", ["labels", "model"])
def test_the_weighted_mean(targets):
    layers = [nn.Linear(3, 4) for _ in range(3)]
    found = fisher(layers, (INPUTS, LABELS), targets=targets, samples=None)
    each = [expected(layer, targets) for layer in layers]
    for name in ("weight", "bias"):
        total = sum(one[name] for one in each)
        mean = sum(one[name] * getattr(layer, name) for one, layer in zip(each, layers, strict=True)) / total
        torch.testing.assert_close(getattr(found, name), mean, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_information_of_a_regression():
    layer = nn.Linear(3, 1)
    targets = torch.randn(20, 1)
    found = information(layer, as_data((INPUTS, targets)), Regression(), targets="labels")
    torch.testing.assert_close(found["bias"], (2 * (layer(INPUTS) - targets)).square().mean(0).detach())
    drawn = information(layer, as_data((INPUTS, targets)), Regression(), samples=400)
    assert float(drawn["bias"]) == pytest.approx(2.0, rel=0.1)  # (2 ε)² with a variance of 1/2


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        ("binary", 1, torch.randint(2, (20, 1))),
        ("multilabel", 3, torch.randint(2, (20, 3))),
        (Regression(head="gaussian", variance="log"), 2, torch.randn(20, 1)),
    ],
    ids=["binary", "multilabel", "gaussian"],
)
def test_other_tasks(task, outputs, targets):
    layers = [nn.Linear(3, outputs) for _ in range(2)]
    for kind in ("model", "labels"):
        found = fisher(layers, (INPUTS, targets), targets=kind, task=task)
        assert bool(found.weight.isfinite().all())
        low, high = torch.aminmax(torch.stack([each.weight for each in layers]), dim=0)
        assert bool(((found.weight >= low - 1e-5) & (found.weight <= high + 1e-5)).all())


def test_quantiles_have_no_labels_to_draw():
    layers = [nn.Linear(3, 3) for _ in range(2)]
    task = Regression(quantiles=(0.1, 0.5, 0.9))
    with pytest.raises(EnfoldError, match="targets"):
        fisher(layers, (INPUTS, torch.randn(20, 1)), task=task)
    assert fisher(layers, (INPUTS, torch.randn(20, 1)), task=task, targets="labels") is not None


def test_unused_weights_are_averaged_and_tied_ones_counted_once():
    base, members = family()
    found = merged("fisher", members, base)
    mean = average(members, images())
    torch.testing.assert_close(found.embed.weight[4], found.head.weight[4])
    assert not torch.allclose(found.conv.weight, mean.conv.weight, atol=1e-3)
    one = [nn.Linear(3, 4), nn.Linear(3, 4)]
    blind = INPUTS * torch.tensor([1.0, 1.0, 0.0])
    unused = fisher(one, (blind, LABELS)).weight[:, 2]
    torch.testing.assert_close(unused, (one[0].weight[:, 2] + one[1].weight[:, 2]) / 2)


def test_frozen_parameters_stay_frozen():
    layers = [nn.Linear(3, 4).requires_grad_(False) for _ in range(2)]
    assert not fisher(layers, (INPUTS, LABELS)).weight.requires_grad
