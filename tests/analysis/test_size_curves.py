"""Ensemble-size curves from the mean member to the ensemble, averaged over subsets and kinds."""

from itertools import combinations

import pytest
import torch

from enfold.analysis.size_curves import (
    SCORES,
    compare_samples_and_modes,
    compute_curves_by_severity,
    compute_size_curve,
)
from enfold.errors import EnfoldError
from enfold.metrics import METRICS, mean_member, over_modes
from enfold.metrics.predictions import Predictions


def said(seed: int, members: int = 4) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (40,), generator=torch.Generator().manual_seed(9))
    hints = 1.5 * torch.nn.functional.one_hot(labels, 3)
    return Predictions.from_logits(hints + torch.randn(members, 40, 3, generator=rng), labels)


def test_a_curve_starts_at_the_mean_member_and_ends_at_the_ensemble() -> None:
    p = said(0)
    curve = compute_size_curve(p)
    assert set(curve) == set(SCORES)
    for name, values in curve.items():
        assert len(values) == 4
        assert float(values[0]) == pytest.approx(mean_member(METRICS[name].function, p))
        assert float(values[-1]) == pytest.approx(METRICS[name].function(p))
    pairs = [METRICS["nll"].function(p.subset(pair)) for pair in combinations(range(4), 2)]
    assert float(curve["nll"][1]) == pytest.approx(sum(pairs) / 6)


def test_severities_are_means_over_kinds() -> None:
    p, q = said(0), said(1)
    found = compute_curves_by_severity({0: [p], 3: [p, q]}, [1, 4])
    expected = (METRICS["brier"].function(p) + METRICS["brier"].function(q)) / 2
    assert float(found[3]["brier"][1]) == pytest.approx(expected)
    torch.testing.assert_close(found[0]["accuracy"], compute_size_curve(p, [1, 4])["accuracy"])
    with pytest.raises(EnfoldError, match="got none for 5"):
        compute_curves_by_severity({5: []})


def test_inside_modes_and_over_them() -> None:
    modes = [said(seed, members=3) for seed in range(4)]
    within, over = compare_samples_and_modes(modes)
    assert len(within["nll"]) == 3
    assert len(over["nll"]) == 4
    own = sum(METRICS["nll"].function(mode) for mode in modes) / 4
    assert float(within["nll"][-1]) == pytest.approx(own)
    assert float(over["nll"][0]) == pytest.approx(own), "a mode alone is the mean of its samples"
    assert float(over["nll"][-1]) == pytest.approx(METRICS["nll"].function(over_modes(modes)))
