"""OT-Fusion: planted copies, plans against another solver, and soft transport."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import ot_fusion
from enfold.merge.ot_fusion import transport
from planted import NETWORKS, assert_back, drawn, pixels, planted


@pytest.mark.combinations
@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional", "normed", "residual"])
def test_permuted_copies_average_to_the_original(name, cost):
    members, network, data = planted(name, 3)
    assert_back(ot_fusion(members, data, cost=cost, repair="none"), network, data)


SIZES = {"first": (4, 12), "second": (12, 12), "third": (12, 12), "head": (12, 3)}


class Chain(nn.Module):
    """Layers without biases, registered from the last to the first."""

    registered = ("head", "third", "second", "first")

    def __init__(self) -> None:
        super().__init__()
        for name in self.registered:
            self.add_module(name, nn.Linear(*SIZES[name], bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(inputs)))))))


class Stream(Chain):
    """The second and third layer are a residual branch; the stream waits for it, and is first to be aligned."""

    registered = ("second", "third", "head", "first")

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        return self.head(torch.relu(stream + self.third(torch.relu(self.second(stream)))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [Chain, Stream])
def test_layers_are_aligned_from_the_input(monkeypatch, make, seed):
    """For any order of registration, units are compared by weights after aligned units."""
    monkeypatch.setitem(NETWORKS, "reversed", (make, (4,)))
    members, network, data = planted("reversed", 3, seed)
    assert_back(ot_fusion(members, data, cost="weights", repair="none"), network, data)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.RNN(3, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.read(inputs)[0][:, -1])


@pytest.mark.parametrize("seed", range(6))
def test_recurrent_units_are_compared_by_input_weights(monkeypatch, seed):
    """The weights between them are in the units' own order on both sides."""
    monkeypatch.setitem(NETWORKS, "recurrent", (Recurrent, (4, 3)))
    members, network, data = planted("recurrent", 3, seed)
    assert_back(ot_fusion(members, data, cost="weights", repair="none"), network, data)


def test_a_regularisation_below_rounding_is_refused():
    with pytest.raises(EnfoldError, match="regularisation"):
        transport(torch.rand(4, 4, dtype=torch.float64), 1e-310)


def test_exact_transport_is_the_cheapest_order():
    costs = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)).double()
    cheapest = min(sum(float(costs[i, j]) for i, j in enumerate(order)) for order in permutations(range(5)))
    assert float((transport(costs) * costs).sum()) == pytest.approx(cheapest)


def test_soft_transport_preserves_its_sums_and_hardens():
    costs = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)).double()
    entropies = []
    for regularisation in (10.0, 1.0, 0.3, 0.1):
        plan = transport(costs, regularisation)
        torch.testing.assert_close(plan.sum(0), torch.ones(6).double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plan.sum(1), torch.ones(6).double(), rtol=1e-4, atol=1e-4)
        entropies.append(float(-(plan * plan.clamp_min(1e-30).log()).sum()))
    assert entropies == sorted(entropies, reverse=True)
    torch.testing.assert_close(transport(costs, 1e-3), transport(costs), rtol=0, atol=1e-2)
    torch.testing.assert_close(transport(costs, 1e6), torch.full((6, 6), 1 / 6).double(), rtol=1e-3, atol=1e-4)


def literal(costs: np.ndarray, regularisation: float) -> np.ndarray:
    """d T of equation (2), by scaling rows and columns of exp(-D / ε) in turns."""
    kernel = np.exp(-costs / (regularisation * costs.mean()))
    for _ in range(2000):
        kernel /= kernel.sum(0)
        kernel /= kernel.sum(1, keepdims=True)
    return kernel


@pytest.mark.parametrize("cost", ["weights", "activations"])
def test_soft_transport_is_at_the_squares_of_distances(cost):
    make, shape = NETWORKS["shallow"]
    networks, data = [drawn(make, seed) for seed in range(2)], pixels(shape)
    (w, b, v, c), (other_w, other_b, other_v, other_c) = (
        [parameter.detach().double().numpy() for parameter in network.parameters()] for network in networks
    )
    if cost == "weights":
        ours, theirs = np.c_[w, b], np.c_[other_w, other_b]
    else:  # of the 60 examples; each counts 1/60, of which the relative ε knows nothing
        inputs = data.train.inputs.double().numpy()
        ours, theirs = (inputs @ w.T + b).T, (inputs @ other_w.T + other_b).T
    squares = np.square(ours[:, None] - theirs).sum(-1)
    plan, rooted = literal(squares, 0.2), literal(np.sqrt(squares), 0.2)
    assert np.abs(plan - rooted).max() > 0.1
    folded = ot_fusion(DeepEnsemble(networks), data, cost=cost, regularisation=0.2, repair="none")
    expected = w + plan @ other_w, b + plan @ other_b, v + other_v @ plan.T, c + other_c
    for parameter, double in zip(folded.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), double / 2, rtol=1e-4, atol=1e-5)


def test_nearly_hard_transport_is_the_exact_one():
    members, network, data = planted("shallow", 2)
    assert_back(ot_fusion(members, data, regularisation=1e-3, repair="none"), network, data, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cost": "loss"}, "cost must be one of weights, activations, got 'loss'"),
        ({"regularisation": -1.0}, "regularisation must be 0 or more, got -1.0"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        ot_fusion(None, None, **settings)


def test_costs_that_are_not_finite_are_refused():
    with pytest.raises(EnfoldError, match="costs"):
        transport(torch.full((2, 2), torch.nan))
