"""Intervals: Student's where seeds differ, that of the test set where they agree; Holm's correction; coverage."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy.stats import t

from enfold.metrics import Predictions, nll
from studies.claims import _correct
from studies.coverage import coverage_table, main, simulate
from studies.intervals import compare, holm, student_interval


def test_seeds_alone_give_the_students_interval():
    found = student_interval([1.0, 2.0, 4.0], 0.0)
    low, high = t.interval(0.95, 2, loc=7 / 3, scale=math.sqrt(7 / 3 / 3))
    assert (found.mean, found.lower, found.upper) == pytest.approx((7 / 3, low, high))
    assert found.p == pytest.approx(2 * t.sf(7 / 3 / math.sqrt(7 / 9), 2))


def test_examples_alone_give_the_normal_interval():
    found = student_interval([0.5, 0.5, 0.5], 0.04)
    assert (found.lower, found.upper) == pytest.approx((0.5 - 1.959964 * 0.2, 0.5 + 1.959964 * 0.2), rel=1e-4)
    assert student_interval([0.5], 0.04).upper == pytest.approx(found.upper)


def test_both_variances_are_added_with_the_degrees_of_freedom_between():
    found = student_interval([0.0, 1.0, 2.0], 1 / 3)
    half = t.ppf(0.975, 2 * 4) * math.sqrt(2 / 3)  # V = 1/3 + 1/3, df = (2/3)² / ((1/3)² / 2)
    assert (found.lower, found.upper) == pytest.approx((1 - half, 1 + half))


def test_one_seed_without_examples_and_no_variance():
    found = student_interval([1.0], 0.0)
    assert (found.lower, found.upper) == (-math.inf, math.inf)
    assert math.isnan(found.p)
    assert student_interval([1.0, 1.0], 0.0).p == 0.0
    assert student_interval([0.0, 0.0], 0.0).p == 1.0


def test_predictions_are_compared_on_common_examples():
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (300,), generator=source)

    def rows(quality: float) -> list[Predictions]:
        logits = [torch.randn(1, 300, 3, generator=source) + quality * torch.eye(3)[labels] for _ in range(3)]
        return [Predictions(each.log_softmax(-1), labels) for each in logits]

    good, bad = rows(2.0), rows(1.0)
    found = compare(good, bad, "nll", replicates=500)
    assert found.values == pytest.approx([nll(one) - nll(other) for one, other in zip(good, bad, strict=True)])
    assert found.upper < 0
    assert found.p < 1e-3
    same = compare(good, good, "nll", replicates=50)
    assert (same.mean, same.p) == (0.0, 1.0)


def test_holms_correction_is_the_published_one():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = holm([0.02, math.nan, 0.5])
    assert (adjusted[0], adjusted[2]) == (0.04, 0.5)
    assert math.isnan(adjusted[1])


def test_the_papers_claims_and_ours_are_corrected_apart():
    def claim(p: float | None, source: str) -> dict[str, object]:
        return {"source": source, "difference": None if p is None else {"p": p}, "verdict": "held"}

    claims = [claim(0.03, "table 1"), claim(0.01, "table 1"), claim(0.04, "a control, not in the paper")]
    claims.append({**claim(None, "table 1"), "verdict": "not run"})
    _correct(claims, 0.95)
    assert [each["verdict_holm"] for each in claims] == ["held", "held", "held", "not run"]
    claims[0]["difference"]["p"] = 0.06
    _correct(claims, 0.95)
    assert [each["verdict_holm"] for each in claims[:3]] == ["within noise", "held", "held"]
    assert claims[1]["difference"]["p_holm"] == pytest.approx(0.02)


def test_students_interval_misses_the_truth_as_often_as_it_says_and_the_bootstrap_more_often():
    found = simulate(3, 1.0, 400)
    assert 0.02 < found["student"] < 0.09
    assert found["bootstrap"] > 0.12


def test_the_simulation_is_written_and_shown(tmp_path, capsys):
    main(["--trials", "2", "--out", str(tmp_path / "coverage.json")])
    capsys.readouterr()
    shown = coverage_table(json.loads((tmp_path / "coverage.json").read_text()))
    assert shown.count("\n") == 2 + 3 * 2
    assert "Student" in shown
