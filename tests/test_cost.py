"""Counts against closed forms; times with a fake clock."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from enfold import cost
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ViT
from fresh import run_python


class Two(Ensemble):
    """Two networks behind one call: (B, ...) -> (2, B, C)."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__([], 2)
        self.members = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])

    def expand(self) -> State:
        raise EnfoldError("two networks that are not expanded")


class Clock:
    """A clock that stands still until `spend` moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


# Parameters and bytes


def test_parameters_trainable_and_all() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    network[0].requires_grad_(False)
    assert cost.parameters(network) == 3 * 4 + 4 + 4 * 2 + 2
    assert cost.parameters(network, trainable_only=True) == 4 * 2 + 2


def tied_object() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    return network


def tied_storage() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network[1].weight = nn.Parameter(network[0].weight.data)
    return network


def tied_transposed() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 8, bias=False), nn.Linear(8, 2, bias=False))
    network[1].weight = nn.Parameter(network[0].weight.data.t())
    return network


@pytest.mark.parametrize("make", [tied_object, tied_storage, tied_transposed])
def test_tied_weights_count_once(make: Callable[[], nn.Module]) -> None:
    assert cost.parameters(make()) == 16
    assert cost.stored_bytes(make()) == 16 * 4


def test_views_of_one_storage_count_what_they_cover() -> None:
    block = torch.zeros(10, 4)
    network = nn.ParameterList([nn.Parameter(block[:3]), nn.Parameter(block[3:5])])
    assert cost.parameters(network) == 20
    assert cost.stored_bytes(network) == 20 * 4


def test_parameters_can_be_counted_without_memory() -> None:
    with torch.device("meta"):
        assert cost.parameters(MediumCNN()) == 971_146


def test_bytes_include_buffers_and_half_precision() -> None:
    network = nn.BatchNorm1d(6)  # weight, bias, mean, variance, and a counter of 8 bytes
    assert cost.stored_bytes(network) == 4 * 6 * 4 + 8
    network.register_buffer("scratch", torch.zeros(100), persistent=False)
    assert cost.stored_bytes(network) == 4 * 6 * 4 + 8
    assert cost.stored_bytes(nn.Linear(3, 5).half()) == (15 + 5) * 2


# FLOPs


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=2, max_size=5), batch=st.integers(1, 5))
def test_flops_of_an_mlp_are_two_per_weight(sizes: list[int], batch: int) -> None:
    network = MLP(sizes[0], sizes[1:-1], sizes[-1])
    expected = sum(2 * a * b for a, b in pairwise(sizes))
    assert cost.flops(network, torch.zeros(batch, sizes[0])) == expected


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_of_a_convolution(groups: int) -> None:
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups)
    assert cost.flops(layer, torch.zeros(3, 4, 9, 7)) == 2 * (5 * 4) * 6 * (4 // groups) * 9


def test_flops_of_a_transformer_include_fused_attention() -> None:
    tokens, width, classes = 49, 16, 10
    block = 2 * tokens * width * width * (4 + 2 * 4) + 2 * 2 * tokens * tokens * width
    expected = 2 * tokens * 16 * width + 3 * block + 2 * width * classes
    network = ViT((1, 28, 28), classes, width=width, depth=3, heads=2)
    assert cost.flops(network, torch.zeros(2, 1, 28, 28)) == expected
    with torch.inference_mode():
        assert cost.flops(network, torch.zeros(2, 1, 28, 28)) == expected


def test_flops_of_torchs_own_attention_and_lstm() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=24, batch_first=True)
    tokens = 7
    expected = 4 * 2 * tokens * 16 * 16 + 2 * 2 * tokens * tokens * 16 + 2 * 2 * tokens * 16 * 24
    assert torch.backends.mha.get_fastpath_enabled()
    assert cost.flops(layer, torch.zeros(2, tokens, 16)) == expected
    assert torch.backends.mha.get_fastpath_enabled()
    lstm = nn.LSTM(3, 5, batch_first=True)
    assert cost.flops(lstm, torch.zeros(2, tokens, 3)) == tokens * 2 * 4 * 5 * (3 + 5)


def test_flops_ignore_initial_work_and_preserve_the_mode() -> None:
    class Lazy(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            assert not self.training
            return super().forward(x) if self.calls > 1 else super().forward(x) + super().forward(x)

    layer = Lazy(3, 4)
    assert cost.flops(layer, torch.zeros(2, 3)) == 24
    assert layer.training


# Latency


def test_every_round_runs_every_call_in_rotated_order() -> None:
    clock, order = Clock(), []

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            clock.spend(1.0)

        return run

    cost.time_rounds({name: call(name) for name in "abc"}, rounds=4, warmup=2, clock=clock)
    assert "".join(order) == "aabbcc" + "abc" + "abc" + "bca" + "cab" + "abc"  # warm-up, repeats, rounds


@pytest.mark.parametrize(("seconds", "repeats"), [(1.0, 1), (0.0021, 1), (0.0006, 4), (0.00003, 128)])
def test_short_calls_are_repeated_until_a_sample_lasts_two_milliseconds(seconds: float, repeats: int) -> None:
    clock, calls = Clock(), []

    def call() -> None:
        calls.append(1)
        clock.spend(seconds)

    samples = cost.time_rounds({"call": call}, rounds=3, warmup=0, clock=clock)
    assert samples["call"] == pytest.approx([seconds] * 3)
    finding = 2 * repeats - 1  # 1 + 2 + 4 + ...
    assert len(calls) == finding + 3 * repeats


def test_a_call_without_duration_ends() -> None:
    assert cost.time_rounds({"call": lambda: None}, rounds=1, warmup=0, clock=lambda: 0.0) == {"call": [0.0]}


def test_ratios_are_taken_within_the_round() -> None:
    clock, loads = Clock(), iter([1, 1, 1, 1, 50, 50, 3, 3, 1, 1])  # the machine is busy in whole rounds

    def call(seconds: float) -> Callable[[], None]:
        return lambda: clock.spend(seconds * next(loads))

    samples = cost.time_rounds({"one": call(0.25), "two": call(0.5)}, rounds=4, warmup=0, clock=clock)
    assert samples == {"one": [0.25, 12.5, 0.75, 0.25], "two": [0.5, 25.0, 1.5, 0.5]}
    assert cost.round_ratio(samples["two"], samples["one"]) == 2.0
    assert cost.round_ratio([6.0, 1.0, 4.0], [2.0, 1.0, 2.0]) == 2.0  # the median of 3, 1 and 2


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=40))
def test_summary_is_that_of_numpy(samples: list[float]) -> None:
    summary = cost.summarise(samples)
    found = (summary.lower, summary.median, summary.upper, summary.p95)
    np.testing.assert_allclose(found, np.percentile(samples, [25, 50, 75, 95]), rtol=1e-12)


def test_latency_in_real_time_is_summarised_and_garbage_collection_comes_back() -> None:
    found = cost.latency({"sum": lambda: torch.ones(10).sum()}, rounds=2, warmup=1)
    assert 0 < found["sum"].lower <= found["sum"].median <= found["sum"].upper <= found["sum"].p95
    assert gc.isenabled()


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 3), (9, -1)])
def test_no_rounds_are_refused(rounds: int, warmup: int) -> None:
    with pytest.raises(EnfoldError, match="rounds"):
        cost.latency({}, rounds=rounds, warmup=warmup)


# Memory


def test_peak_memory_is_the_maximum_allocated() -> None:
    def call() -> Tensor:
        first = torch.empty(1000)  # 4,000 bytes live
        second = torch.empty(500)  # 6,000
        del first  # 2,000
        third = torch.empty(250)  # 3,000
        del second
        return third

    assert cost.peak_memory(call) == 6_000


def test_peak_memory_counts_outputs_but_not_earlier_tensors() -> None:
    layer, inputs = nn.Linear(100, 50, bias=False), torch.zeros(8, 100)
    with torch.inference_mode():
        assert cost.peak_memory(lambda: layer(inputs)) == 8 * 50 * 4


def test_peak_memory_counts_buffers_inside_an_operation() -> None:
    inputs = torch.zeros(1000)
    found = cost.peak_memory(lambda: torch.logsumexp(inputs, 0))
    assert found is not None
    assert found >= 4_000


def test_peak_memory_of_an_unsupported_device() -> None:
    assert cost.peak_memory(lambda: None, "meta") is None


def test_peak_memory_prints_nothing() -> None:
    code = "import torch; from enfold.cost import peak_memory; print(peak_memory(lambda: torch.empty(10)))"
    done = run_python(code, check=True)
    assert (done.stdout, done.stderr) == ("40\n", "")


# All together


@pytest.fixture(scope="module")
def costs() -> tuple[dict[str, nn.Module], dict[str, cost.Cost]]:
    models = {"one": MLP(12, (8,), 4), "two": Two(lambda: MLP(12, (8,), 4))}
    models["two"].members[1].eval()
    return models, cost.measure(models, "one", torch.zeros(3, 2, 2), batch_sizes=(1, 16), rounds=2, warmup=1)


def test_two_networks_cost_twice_as_much(costs: tuple[dict[str, nn.Module], dict[str, cost.Cost]]) -> None:
    one, two = costs[1]["one"], costs[1]["two"]
    weights = 12 * 8 + 8 + 8 * 4 + 4
    assert (one.parameters, one.trainable, one.bytes) == (weights, weights, 4 * weights)
    assert (one.flops, one.passes) == (2 * (12 * 8 + 8 * 4), 1)
    assert one.peak_memory == 16 * (8 + 8) * 4  # a hidden layer before and after ReLU, at the largest batch
    assert two.passes == 2
    ratios = two.ratios
    assert (ratios.parameters, ratios.bytes, ratios.flops, ratios.passes) == (2, 2, 2, 2)
    assert one.ratios == cost.Ratios(1, 1, 1, 1, 1, {1: 1.0, 16: 1.0})
    assert set(two.latency) == set(ratios.latency) == {1, 16}
    assert min(ratios.latency.values()) > 0


def test_a_cost_is_json(costs: tuple[dict[str, nn.Module], dict[str, cost.Cost]]) -> None:
    found = json.loads(json.dumps({name: dataclasses.asdict(own) for name, own in costs[1].items()}))
    assert found["two"]["ratios"]["flops"] == 2
    assert found["two"]["latency"]["16"]["median"] == costs[1]["two"].latency[16].median


def test_measuring_restores_every_mode(costs: tuple[dict[str, nn.Module], dict[str, cost.Cost]]) -> None:
    two = costs[0]["two"]
    assert two.training
    assert [member.training for member in two.members] == [True, False]
    assert not torch.is_inference_mode_enabled()


def test_measured_latency_ratio_with_a_fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cost, "_synchronised_clock", clock)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_inference_mode_enabled()
            clock.spend(len(x))
            return x

    models = {"one": Slow(), "two": Two(Slow)}
    found = cost.measure(models, "one", torch.zeros(2), batch_sizes=(1, 4), rounds=3)
    assert found["one"].latency == {size: cost.Latency(size, size, size, size) for size in (1, 4)}
    assert found["two"].ratios.latency == {1: 2.0, 4: 2.0}
    assert found["two"].ratios.flops is None  # of nothing


@pytest.mark.parametrize(
    ("reference", "batch_sizes", "message"),
    [("three", (1,), "reference"), ("one", (), "batch_sizes"), ("one", (0,), "batch_sizes")],
)
def test_wrong_measurements_are_refused(reference: str, batch_sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(EnfoldError, match=message):
        cost.measure({"one": nn.Identity()}, reference, torch.zeros(2), batch_sizes=batch_sizes)


class Normed(nn.Module):
    """A norm of a bare weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.randn(2, 4)), nn.LayerNorm(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.norm(self.query).t()


@pytest.mark.parametrize("make", [lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2, bias=False)), Normed])
def test_flops_where_modules_are_called_with_weights(make: Callable[[], nn.Module]) -> None:
    network = make()
    with torch.inference_mode():
        assert cost.flops(network, torch.randn(3, 4)) == (2 * 4 * 2)
    assert all(parameter.requires_grad for parameter in network.parameters())
