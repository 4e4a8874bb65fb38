"""C²M³: matches agree around every cycle, planted copies average back, the objective never ends below its start."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, c2m3
from enfold.merge.c2m3 import _interpolate, _Universe
from enfold.networks import ViT
from planted import NETWORKS, assert_back, drawn, pixels, planted


def objective(members: DeepEnsemble) -> float:
    """Σ_{a<b} <θ_a, θ_b> over parameters."""
    found = 0.0
    for name in members.skeleton.parameters:
        stacked = members.expand()[name].detach().double().flatten(1)
        found += float((stacked @ stacked.mT).triu(1).sum())
    return found


def order_of(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Which row of `before` is in each row of `after`."""
    return (after[:, None] == before[None]).all(-1).long().argmax(1)


@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional", "residual"])
def test_permuted_copies_average_to_the_original(name):
    members, network, data = planted(name, 3)
    assert_back(c2m3(members, data, repair="none"), network, data)


def test_copies_are_found_from_their_own_orders_by_steps_of_the_best_length():
    """All members move together: with full steps they would miss each other."""
    members, network, data = planted("deep", 3)
    assert_back(c2m3(members, data, start="identity", repair="none"), network, data)


@pytest.mark.parametrize("name", ["deep", pytest.param("attending", marks=pytest.mark.slow), "experts"])
def test_each_step_has_the_best_length(name, monkeypatch):
    ways, true = [], _Universe.gradient

    def spied(universe, matrices):
        slopes = true(universe, matrices)
        ways.append((matrices, universe.as_matrices(universe.nearest_orders(slopes)), universe.value))
        return slopes

    monkeypatch.setattr(_Universe, "gradient", spied)
    members, _, data = planted(name, 3)
    align(members, data, method="c2m3", start="identity", iterations=10)
    reached = [value(matrices) for matrices, _, value in ways]
    for (here, towards, value), (_, found) in zip(ways, pairwise(reached), strict=False):
        assert found >= max(value(_interpolate(here, towards, step / 20)) for step in range(21)) - 1e-9
    assert len(ways) > 2


@pytest.mark.parametrize("start", ["matched", "identity", "uniform"])
def test_matches_agree_around_a_cycle(start):
    make, shape = NETWORKS["deep"]
    members, data = DeepEnsemble([drawn(make, seed) for seed in range(3)]), pixels(shape)
    matched = align(members, data, method="c2m3", start=start, iterations=30)
    orders = [
        order_of(one.hidden[0].weight.detach(), other.hidden[0].weight.detach())
        for one, other in zip(members, matched, strict=True)
    ]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(12))
    cycle = torch.arange(12)
    for one, other in ((0, 1), (1, 2), (2, 0)):  # unit i of one is unit orders[other][place of i] of the other
        cycle = orders[other][orders[one].argsort()[cycle]]
    assert torch.equal(cycle, torch.arange(12))
    assert torch.equal(orders[0], torch.arange(12))  # the universe is in member 0's order


@pytest.mark.parametrize(("start", "count"), [("matched", 4), ("identity", 2), ("uniform", 2)])
def test_the_objective_is_never_below_its_start(start, count):
    make, shape = NETWORKS["deep"]
    members, data = DeepEnsemble([drawn(make, seed) for seed in range(count)]), pixels(shape)
    begun = align(members, data) if start == "matched" else members
    found = align(members, data, method="c2m3", start=start, iterations=30)
    assert objective(found) >= objective(begun) - 1e-6
    assert objective(found) > objective(members)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_worse_orders_are_rejected(noise):
    """Without a step, those of a uniform start are random."""
    make, shape = NETWORKS["deep"]
    networks, data = [drawn(make) for _ in range(3)], pixels(shape)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (parameter for network in networks for parameter in network.parameters()):
            parameter.add_(noise * torch.randn(parameter.shape, generator=source))
    members = DeepEnsemble(networks)
    found = align(members, data, method="c2m3", start="uniform", iterations=0)
    for name, tensor in members.expand().items():
        assert torch.equal(found.expand()[name], tensor)


def test_it_stops_after_the_patience(monkeypatch):
    steps, true = [], _Universe.gradient
    monkeypatch.setattr(_Universe, "gradient", lambda *given: steps.append(1) or true(*given))
    members, _, data = planted("deep", 3)

    def taken(**settings: float) -> int:
        steps.clear()
        align(members, data, method="c2m3", start="identity", **settings)
        return len(steps)

    assert [taken(gain=1e9, patience=patience) for patience in (1, 2, 3)] == [1, 2, 3]  # any gain is little
    assert taken(gain=0, patience=1) == taken(gain=0, patience=200) > 3


def test_joint_matching_is_better_than_pairwise_matching():
    make, shape = NETWORKS["shallow"]
    members, data = DeepEnsemble([drawn(make, seed) for seed in range(5)]), pixels(shape)
    assert objective(align(members, data, method="c2m3")) > objective(align(members, data))


def test_heads_compute_the_same_function():
    data = pixels((3, 8, 8))
    members = DeepEnsemble(
        [drawn(lambda: ViT((3, 8, 8), 3, width=8, depth=1, heads=2, expansion=2), s) for s in range(2)]
    )
    matched = align(members, data, method="c2m3", iterations=3)
    torch.testing.assert_close(matched(data.test.inputs), members(data.test.inputs), rtol=1e-3, atol=1e-4)
    assert objective(matched) > objective(members)


def test_members_compute_the_same_function(members, data):
    matched = align(members, data, method="c2m3")
    inputs = data.test.inputs
    torch.testing.assert_close(matched.eval()(inputs), members.eval()(inputs), rtol=1e-4, atol=1e-5)


def test_two_members_with_one_hidden_layer_are_matched_optimally():
    make, shape = NETWORKS["shallow"]
    members, data = DeepEnsemble([drawn(make, seed) for seed in range(2)]), pixels(shape)
    assert objective(align(members, data, method="c2m3")) == pytest.approx(objective(align(members, data)), rel=1e-9)


def test_unknown_starts_are_refused():
    with pytest.raises(EnfoldError, match="start"):
        c2m3(None, None, start="warm")


@pytest.mark.parametrize("settings", [{"iterations": -1}, {"patience": 0}, {"gain": float("nan")}])
def test_invalid_options(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        c2m3(None, None, **settings)
