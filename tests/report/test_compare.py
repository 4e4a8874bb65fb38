"""Differences of rows are those of the bootstrap that claims are judged by."""

import pytest
import torch

from enfold.metrics import paired_difference
from enfold.metrics.predictions import Predictions
from enfold.run.compare import REPLICATES, Comparison


def _said(members: int, seed: int) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (120,), generator=torch.Generator().manual_seed(9))
    return Predictions.from_logits(torch.randn(members, 120, 3, generator=rng), labels)


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_a_difference_is_that_of_the_paired_bootstrap(metric: str) -> None:
    ensemble, kd = [_said(3, seed) for seed in range(3)], [_said(1, 10 + seed) for seed in range(3)]
    comparison = Comparison({"ensemble": ensemble, "kd": kd}, sizes=(2,))
    for name, said, alone in (("kd", kd, False), ("ensemble", ensemble, False)):
        found = comparison.difference(name, "mean member", metric)
        wanted = paired_difference(said, ensemble, metric, replicates=REPLICATES, mean_member=(alone, True))
        assert (found.mean, found.lower, found.upper) == pytest.approx(
            (wanted.mean, wanted.lower, wanted.upper), abs=1e-12
        )
    two = [each.subset(range(2)) for each in ensemble]
    wanted = paired_difference(two, kd, metric, replicates=REPLICATES)
    assert comparison.difference("ensemble of 2", "kd", metric).lower == pytest.approx(wanted.lower, abs=1e-12)


def test_no_difference_for_equal_or_missing_rows() -> None:
    comparison = Comparison({"ensemble": [_said(3, 0)]})
    assert comparison.difference("mean member", "mean member", "nll") is None
    assert comparison.difference("kd", "ensemble", "nll") is None
    assert Comparison({}).to_mean_member(["ensemble", "kd"]) == {}


def test_an_infinite_score_gives_no_interval() -> None:
    labels = torch.zeros(120, dtype=torch.int64)
    sure = torch.tensor([-torch.inf, 0.0]).expand(1, 120, 2)
    fair = torch.full((2, 120, 2), 0.5).log()
    comparison = Comparison({"ensemble": [Predictions(fair, labels)], "kd": [Predictions(sure, labels)]})
    assert comparison.difference("kd", "mean member", "nll") is None
    assert comparison.difference("kd", "mean member", "accuracy") is not None
