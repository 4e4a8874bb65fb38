"""Cells of tables: noise, failed merges and equal latencies are shown as such."""

from typing import Any

import pytest

from enfold.report.table import format_gain, format_latency, is_gain_noise


def _summary(single: list[float], ensemble: list[float], gain: float, **extra: Any) -> dict[str, Any]:
    scores = {"mean member": single, "ensemble": ensemble, "kd": ensemble}
    rows: dict[str, Any] = {
        name: {"scores": {"nll": {"values": values}}, "gain_recovered": {"mean": gain, "std": None}}
        for name, values in scores.items()
    }
    rows["ensemble"] |= extra
    return {"rows": rows}


@pytest.mark.parametrize(
    ("single", "ensemble", "extra", "noise"),
    [
        ([0.50, 0.52, 0.51], [0.45, 0.46, 0.46], {}, False),
        ([0.50, 0.52, 0.51], [0.50, 0.51, 0.52], {}, True),
        ([0.5], [0.4], {"gain_interval": (-0.11, -0.09)}, False),
        ([0.5], [0.499], {"gain_interval": (-0.01, 0.01)}, True),
        ([0.5], [0.499], {}, False),
    ],
)
def test_a_gain_within_noise_is_found_from_seeds_or_the_bootstrap(
    single: list[float], ensemble: list[float], extra: dict[str, Any], noise: bool
) -> None:
    summary = _summary(single, ensemble, 14.17, **extra)
    assert is_gain_noise(summary, "kd") == noise
    assert format_gain(summary, "kd") == ("within noise" if noise else "> 500 %")


@pytest.mark.parametrize(("gain", "text"), [(0.75, "75 %"), (-0.5, "-50 %"), (-151.95, "< -100 %"), (14.17, "> 500 %")])
def test_a_gain_of_a_failed_merge_is_not_a_number(gain: float, text: str) -> None:
    assert format_gain(_summary([0.5], [0.4], gain), "kd") == text


@pytest.mark.parametrize(("lower", "text"), [(0.9e-3, "1.10 (equal)"), (1.05e-3, "1.10 (1.10x)")])
def test_latencies_with_overlapping_quartiles_are_equal(lower: float, text: str) -> None:
    reference = {"median": 1e-3, "lower": 0.98e-3, "upper": 1.02e-3}
    own = {"median": 1.1e-3, "lower": lower, "upper": 1.2e-3}
    cost = {"latency": {"1": own}, "reference": {"latency": {"1": reference}}, "ratios": {"latency": {"1": 1.1}}}
    assert format_latency(cost, "1", False) == text
    assert format_latency({**cost, "latency": {"1": reference}}, "1", False) == "1.00"
