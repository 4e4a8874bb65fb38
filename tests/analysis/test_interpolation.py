"""Lines between networks: ends, closed forms, the three ways to treat batch norm, and barriers of known curves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.analysis.interpolation import Line, compute_barrier, compute_barriers, interpolate
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import hidden_layers, repair_layers
from enfold.metrics import accuracy, nll
from enfold.symmetry import match_state, symmetries
from enfold.train.batch_norm import reestimate
from planted import NETWORKS, drawn, pixels, planted


def two(name: str) -> tuple[DeepEnsemble, Data]:
    """Two networks that have nothing in common."""
    make, shape = NETWORKS[name]
    return DeepEnsemble([drawn(make, 1), drawn(make, 2)]), pixels(shape)


def line_of(members: DeepEnsemble, data: Data, **settings: object) -> Line:
    return interpolate(members.member(0), *states_of(members), data, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["deep", "convolutional"])
def test_the_ends_are_the_networks(name: str) -> None:
    members, data = two(name)
    line = line_of(members, data, points=5)
    said = predict(members, data.test)
    assert line.alphas.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    for place, index in ((-1, 0), (0, 1)):
        own = said.member(index)
        assert float(line.loss[place]) == pytest.approx(nll(own), rel=1e-5)
        assert float(line.accuracy[place]) == accuracy(own)
        assert float(line.total_loss[place]) == pytest.approx(len(data.test) * nll(own), rel=1e-5)


def test_the_middle_is_the_mean_network() -> None:
    members, data = two("deep")
    network = members.member(0)
    with torch.no_grad():
        for own, other in zip(network.parameters(), members.member(1).parameters(), strict=True):
            own.lerp_(other, 0.25)
    expected = nll(predict(network, data.test))
    assert float(line_of(members, data, points=9).loss[6]) == pytest.approx(expected, rel=1e-5)


def test_logits_of_a_linear_network_are_linear_along_the_line() -> None:
    """So its loss, which is convex in logits, never rises above the chord."""
    torch.manual_seed(0)
    members, data = DeepEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)]), pixels((4,))
    line = line_of(members, data, points=11)
    assert compute_barriers(line)["loss"].height == 0.0
    assert compute_barriers(line)["loss"].area < 0


def test_a_matched_copy_is_at_the_end_of_a_flat_line_and_an_unmatched_one_is_not() -> None:
    members, _, data = planted("deep", 2)
    first, second = states_of(members)
    network = members.member(0)
    symmetry = symmetries(network, data.train.inputs[:2])
    flat = interpolate(network, first, match_state(first, second, symmetry), data, points=5)
    torch.testing.assert_close(flat.loss, flat.loss[:1].expand(5), rtol=1e-6, atol=1e-6)
    assert compute_barriers(flat)["loss"].height == pytest.approx(0, abs=1e-6)
    naive = compute_barriers(interpolate(network, first, second, data, points=5))["loss"]
    assert abs(naive.area) > 1e-3


def test_batch_norm_modes() -> None:
    members, data = two("convolutional")
    first, second = states_of(members)
    middle = {name: torch.lerp(t, second[name], 0.5) if t.is_floating_point() else t for name, t in first.items()}
    network = members.network(middle).eval()
    stored = nll(predict(network, data.test))
    reestimate(network, data)
    reset = nll(predict(network, data.test))
    network[1].train()
    with torch.no_grad():
        logits = network(data.test.inputs)
    of_batch = nn.functional.cross_entropy(logits, data.test.labels).item()
    expected = {"stored": stored, "reset": reset, "train": of_batch}
    assert len({round(value, 4) for value in expected.values()}) == 3
    for mode, value in expected.items():
        found = line_of(members, data, points=3, batch_norm=mode)
        assert float(found.loss[1]) == pytest.approx(value, rel=1e-4), mode
    torch.testing.assert_close(states_of(members)[0], first, rtol=0, atol=0)


def test_batch_statistics_do_not_reveal_the_class_in_sorted_data() -> None:
    members, data = two("convolutional")
    test = Split(torch.cat([data.test.inputs] * 60), torch.cat([data.test.labels] * 60))  # more than one batch
    order = test.labels.argsort()
    several = [data.replace(test=each) for each in (test, test[order])]
    plain, by_class = (line_of(members, each, points=2, batch_norm="train") for each in several)
    torch.testing.assert_close(plain.loss, by_class.loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", ["deep", "convolutional"])
def test_a_repaired_line_contains_the_ends_and_the_repaired_average(name: str) -> None:
    members, data = two(name)
    first, second = states_of(members)
    line = line_of(members, data, points=5, repair=True)
    if name == "deep":  # where no statistics are stored that would not fit
        losses = [nll(predict(members.member(index), data.test)) for index in (1, 0)]
        assert line.loss[[0, -1]].tolist() == pytest.approx(losses, rel=1e-4)
    network = members.network(mean_of([first, second], [0.25, 0.75]))
    names = hidden_layers(network, symmetries(network, data.prepare(data.train.inputs[:2])))
    repair_layers(network, list(members), data, names, weights=(0.25, 0.75))
    reestimate(network, data)
    assert names
    assert float(line.loss[1]) == pytest.approx(nll(predict(network, data.test)), rel=1e-4)
    assert abs(float(line.loss[1] - line_of(members, data, points=5).loss[1])) > 5e-4


def test_the_barrier_of_a_parabola() -> None:
    """1 + 4h α(1 - α) on a slope: h high, in the middle, with an area of 2h/3."""
    alphas = torch.linspace(0, 1, 201, dtype=torch.float64)
    found = compute_barrier(alphas, 1 + 3 * alphas + 4 * 0.6 * alphas * (1 - alphas))
    assert found.height == pytest.approx(0.6)
    assert found.at == pytest.approx(0.5)
    assert found.area == pytest.approx(0.4, abs=1e-4)
    below = compute_barrier(alphas, 1 - alphas * (1 - alphas))
    assert below.height == 0
    assert below.area == pytest.approx(-1 / 6, abs=1e-4)


def test_the_barrier_of_the_error_is_the_negative_barrier_of_the_accuracy() -> None:
    values = torch.tensor([0.9, 0.6, 0.8], dtype=torch.float64)
    alphas = torch.linspace(0, 1, 3, dtype=torch.float64)
    found = compute_barriers(Line(alphas, 1 - values, values, values))
    assert found["error"] == found["loss"]
    assert found["error"].height == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"points": 1}, "points"), ({"batch_norm": "other"}, "'other'")],
)
def test_invalid_lines_are_refused(change: dict[str, object], message: str) -> None:
    members, data = two("deep")
    with pytest.raises(EnfoldError, match=message):
        line_of(members, data, **change)


def test_a_state_of_another_network_is_refused() -> None:
    (members, data), (others, _) = two("deep"), two("shallow")
    with pytest.raises(EnfoldError, match=r"head\.weight|hidden"):
        interpolate(members.member(0), states_of(members)[0], states_of(others)[0], data)
