"""Soups: closed forms, what a greedy soup takes and leaves, and weights that are learned on validation data."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge import average, repair, soup, soup_weights
from enfold.merge.common.inputs import BufferMismatchWarning
from enfold.merge.repair import RepairKind
from enfold.merge.soup import SingleModelWarning, choose_ingredients, learn_weights
from enfold.metrics import METRICS

pytestmark = pytest.mark.filterwarnings("ignore::enfold.merge.soup.SingleModelWarning")


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.T.shape, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def axes() -> Data:
    """Three classes on three axes."""
    labels = torch.arange(60) % 3
    inputs = torch.eye(3)[labels] + 0.3 * torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    part = Split(inputs, labels)
    return Data(part, part, part, 3, (3,))


GOOD, BAD = torch.eye(3), torch.eye(3).roll(1, 0)


def test_uniform_is_the_average(members, data):
    expected = average(members, data).state_dict()
    for name, tensor in soup(members, data, kind="uniform").state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("score", ["accuracy", "nll"])
def test_greedy_rejects_harmful_members(score):
    members = DeepEnsemble([linear(-5 * GOOD), linear(GOOD), linear(3 * BAD), linear(2 * GOOD)])
    assert set(choose_ingredients(members, axes(), score)) <= {1, 3}
    assert choose_ingredients(members, axes(), score)[0] == (3 if score == "nll" else 1)
    assert METRICS["accuracy"].function(predict(soup(members, axes(), score=score), axes().test)) > 0.9


def test_greedy_accepts_harmless_members():
    """The rule is "at least as good", so an equal ingredient is added."""
    members = DeepEnsemble([linear(GOOD), linear(4 * GOOD), linear(2 * GOOD)])
    assert choose_ingredients(members, axes()) == [0, 1, 2]
    torch.testing.assert_close(soup(members, axes()).weight, 7 / 3 * GOOD)


@pytest.mark.parametrize("repair", ["none", "reset", "repair"])
@pytest.mark.parametrize("score", ["accuracy", "nll"])
def test_greedy_is_never_worse_on_validation_data_than_the_best_member(members, data, score, repair):
    sign = 1 if score == "accuracy" else -1
    found, *alone = (
        sign * METRICS[score].function(predict(network, data.val))
        for network in (soup(members, data, score=score, repair=repair), *members)
    )
    assert found >= max(alone) - 1e-6


@pytest.fixture
def kitchen(members) -> DeepEnsemble:
    """A member, one close to it, and one that has diverged."""
    return DeepEnsemble([moved(members.member(1), amount) for amount in (0.0, 0.1, 3.0)])


@torch.no_grad()
def moved(network: nn.Module, amount: float) -> nn.Module:
    source = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.add_(amount * torch.randn(parameter.shape, generator=source))
    return network


@pytest.mark.parametrize("repair", get_args(RepairKind))
def test_greedy_of_one_ingredient_is_that_member_with_its_statistics(kitchen, data, repair):
    assert choose_ingredients(kitchen[[0, 2]], data, repair=repair) == [0]
    found, expected = soup(kitchen[[0, 2]], data, repair=repair).state_dict(), kitchen.member(0).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def spreads(network: nn.Module, data: Data) -> torch.Tensor:
    return network.inner(data.train.inputs).detach().std(0)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
@pytest.mark.parametrize("repair", ["repair", "rescale"])
@pytest.mark.parametrize("kind", ["greedy", "learned"])
def test_a_repair_is_weighted_like_the_soup(kitchen, data, kind, repair):
    options = {"kind": kind, "repair": repair, "epochs": 20, "lr": 0.5}
    if kind == "greedy":
        assert sorted(choose_ingredients(kitchen, data, repair=repair)) == [0, 1]
        weights = torch.tensor([0.5, 0.5, 0.0])
    else:
        kitchen = kitchen[:2]
        weights = torch.tensor(soup_weights(kitchen, data, **options))
        assert abs(weights[0] - weights[1]) > 0.5
    each = torch.stack([spreads(member, data) for member in kitchen])
    torch.testing.assert_close(spreads(soup(kitchen, data, **options), data), weights @ each, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(weights @ each, each.mean(0), rtol=1e-3)


def test_learned_weights_favour_useful_members():
    members = DeepEnsemble([linear(GOOD), linear(BAD), linear(-GOOD)])
    weights = learn_weights(members, axes(), epochs=60)
    assert float(weights.sum()) == pytest.approx(1)
    assert weights[0] > 0.9
    made = soup(members, axes(), kind="learned", epochs=60)
    torch.testing.assert_close(made.weight, weights[0] * GOOD + weights[1] * BAD - weights[2] * GOOD)


def test_learned_weights_do_not_depend_on_the_temperature():
    """The first member is right but so unsure that, without β, one that is half wrong has the lower loss."""
    members = DeepEnsemble([linear(0.1 * GOOD), linear(GOOD + BAD)])
    assert learn_weights(members, axes(), epochs=60)[0] > 0.5


def test_an_untrained_learned_soup_is_uniform(members, data):
    learned, uniform = (soup(members, data, kind=kind, epochs=0).state_dict() for kind in ("learned", "uniform"))
    torch.testing.assert_close(dict(learned), dict(uniform))


def test_the_first_step_follows_the_gradient():
    """AdamW's first step is the learning rate against the sign of the gradient of the softmax's inputs."""
    members = DeepEnsemble([linear(GOOD), linear(BAD)])
    weights = learn_weights(members, axes(), epochs=1)
    torch.testing.assert_close(weights, torch.tensor([0.05, -0.05]).softmax(0))


@pytest.mark.parametrize("kind", ["greedy", "learned"])
def test_selection_needs_validation_data(members, data, kind):
    with pytest.raises(EnfoldError, match="val"):
        soup(members, data.replace(val=[]), kind=kind)
    assert soup(members, data.replace(val=[]), kind="uniform") is not None


def test_the_test_split_is_not_used(members, data):
    for kind in ("greedy", "learned"):
        one, other = (soup(members, part, kind=kind).state_dict() for part in (data, data.replace(test=[])))
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cold"}, "kind must be one of uniform, greedy, learned, got 'cold'"),
        ({"score": "precision"}, "score must be one of accuracy, nll, ... or None, got 'precision'"),
        ({"epochs": -1}, "epochs of 0 or more"),
        ({"lr": 0.0}, "lr above 0"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        soup(None, None, **settings)


def test_a_greedy_soup_of_one_member_gives_a_warning(kitchen, data):
    with pytest.warns(SingleModelWarning, match="the soup is member 0 only"):
        soup(kitchen[[0, 2]], data)


@pytest.mark.parametrize(
    ("kind", "expected"), [("uniform", [1 / 3, 1 / 3, 1 / 3]), ("greedy", [0.5, 0.5, 0.0])], ids=["uniform", "greedy"]
)
def test_the_weights_of_a_soup(kitchen, data, kind, expected):
    assert soup_weights(kitchen, data, kind=kind) == expected


def test_the_weights_of_a_learned_soup(kitchen, data):
    weights = soup_weights(kitchen, data, kind="learned", epochs=1)
    assert weights == learn_weights(kitchen, data, epochs=1).tolist()
    assert soup_weights(kitchen[:1], data, kind="learned") == [1.0]


@pytest.mark.parametrize("kind", ["greedy", "learned"])
def test_a_later_repair_uses_the_weights_of_the_soup(kitchen, data, kind):
    within = soup(kitchen, data, kind=kind, repair="repair")
    behind = soup(kitchen, data, kind=kind, repair="none")
    weights = soup_weights(kitchen, data, kind=kind, repair="none")
    behind = repair(behind, kitchen, data, weights=weights)
    for name, tensor in within.state_dict().items():
        torch.testing.assert_close(behind.state_dict()[name], tensor)


class Masked(nn.Linear):
    """A weight and which of its values count."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mask", torch.rand(3, 4).round())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight * self.mask, self.bias)


@pytest.mark.parametrize("kind", ["uniform", "greedy", "learned"])
def test_buffers_without_a_mean_give_one_warning(data, kind):
    with pytest.warns(BufferMismatchWarning, match="'mask' differs") as told:
        soup(DeepEnsemble(Masked, 3), data, kind=kind)
    assert len([one for one in told if one.category is BufferMismatchWarning]) == 1
