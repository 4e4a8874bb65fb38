"""Replicates against the metrics, intervals against theory, and refused arguments."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from enfold.errors import EnfoldError
from enfold.metrics import (
    Difference,
    accuracy,
    brier,
    disagreement,
    draw_counts,
    ece,
    left_out_fraction,
    mean_member,
    metric_value,
    nll,
    normalised_disagreement,
    paired_difference,
    replicates,
)
from enfold.metrics import bootstrap as module
from enfold.metrics.predictions import Predictions

METRICS = {
    "accuracy": accuracy,
    "nll": nll,
    "brier": brier,
    "ece": ece,
    "disagreement": disagreement,
    "diversity": normalised_disagreement,
}
names = st.sampled_from(sorted(METRICS))


def members(M=3, N=300, seed=0, signal=1.5, noise=1.0, common=0.5):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % 4
    shared, own = torch.randn(N, 4, generator=rng), torch.randn(M, N, 4, generator=rng)
    logits = signal * torch.nn.functional.one_hot(labels, 4) + common * shared + noise * own
    return Predictions.from_logits(logits.double(), labels)


def same(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(name=names, p=st.from_type(Predictions))
def test_every_example_once_is_the_metric(name, p):
    assume(p.num_members > 1 or name not in module.BETWEEN_MEMBERS)
    same(replicates(name, p, torch.ones(1, len(p))), [METRICS[name](p)])
    assert metric_value(name, p) == METRICS[name](p)


@settings(max_examples=25)
@given(name=names, p=st.from_type(Predictions), data=st.data())
def test_a_replicate_is_the_metric_of_the_examples_repeated(name, p, data):
    assume(p.num_members > 1 or name not in module.BETWEEN_MEMBERS)
    drawn = data.draw(st.lists(st.integers(0, len(p) - 1), min_size=1, max_size=12))
    counts = torch.bincount(torch.tensor(drawn), minlength=len(p))[None]
    repeated = Predictions(p.log_probs[:, drawn], p.labels[drawn])
    same(replicates(name, p, counts), [METRICS[name](repeated)])


@pytest.mark.parametrize("name", METRICS)
def test_replicates_do_not_depend_on_blocks(name, monkeypatch):
    p, counts = members(N=50), draw_counts(50, 7, seed=3)
    expected = []
    for row in counts:
        drawn = torch.repeat_interleave(torch.arange(50), row.long())
        expected.append(METRICS[name](Predictions(p.log_probs[:, drawn], p.labels[drawn])))
    same(replicates(name, p, counts), expected)
    monkeypatch.setattr(module, "_ENTRIES_AT_ONCE", 100)
    same(replicates(name, p, counts), expected)


def test_counts_are_those_of_draws_with_replacement():
    counts = draw_counts(400, 500, seed=0)
    assert counts.shape == (500, 400)
    assert (counts.sum(1) == 400).all()
    assert counts.double().var().item() == pytest.approx(1 - 1 / 400, abs=0.02)
    assert (counts == 0).double().mean().item() == pytest.approx(left_out_fraction(400), abs=0.005)
    assert counts.double().mean(0).std().item() == pytest.approx(1 / math.sqrt(500), rel=0.15), "no example is favoured"


def test_draws_depend_on_the_seed_only(monkeypatch):
    counts = draw_counts(60, 40, seed=1)
    assert not torch.equal(counts, draw_counts(60, 40, seed=2))
    assert torch.equal(counts[:15], draw_counts(60, 15, seed=1))
    monkeypatch.setattr(module, "_ENTRIES_AT_ONCE", 130)
    module._draw_counts.cache_clear()
    again = draw_counts(60, 40, seed=1)
    assert torch.equal(counts, again)
    again.zero_()
    assert torch.equal(counts, draw_counts(60, 40, seed=1)), "what is given away is a copy"


def test_one_seed_has_the_interval_of_the_normal_approximation():
    first, second = members(N=2000, signal=2.0), members(N=2000, seed=1)
    found = paired_difference([first], [second], "nll")
    gaps = module.example_nll(first) - module.example_nll(second)
    half = norm.ppf(0.975) * gaps.std().item() / math.sqrt(2000)
    assert found.mean == pytest.approx(gaps.mean().item())
    assert found.values == (found.mean,)
    assert found.lower == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.upper == pytest.approx(found.mean + half, abs=0.1 * half)


def test_the_interval_contains_the_noise_between_seeds():
    first = [members(seed=seed, signal=1.5 + offset) for seed, offset in enumerate((-1.0, 0.0, 1.0, 0.3))]
    second = [members(seed=10 + seed) for seed in range(4)]
    found = paired_difference(first, second, "accuracy")
    assert found.values == tuple(accuracy(a) - accuracy(b) for a, b in zip(first, second, strict=True))
    assert found.mean == pytest.approx(np.mean(found.values))
    spread = np.std(found.values) / math.sqrt(4)  # of a mean of 4 seeds drawn with replacement
    assert found.upper - found.lower > 0.9 * 2 * norm.ppf(0.975) * spread
    assert found == paired_difference(first, second, "accuracy")
    assert found != paired_difference(first, second, "accuracy", seed=1)
    narrow = paired_difference(first, second, "accuracy", level=0.5)
    assert found.lower < narrow.lower < narrow.upper < found.upper


@pytest.mark.parametrize("name", METRICS)
def test_a_model_does_not_differ_from_itself(name):
    models = [members(N=80, seed=seed) for seed in range(3)]
    found = paired_difference(models, models, name, replicates=50)
    assert (found.mean, found.lower, found.upper) == (0, 0, 0)
    assert found.verdict("above") == found.verdict("below") == "within noise"


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [("accuracy", "above", "below"), ("nll", "below", "above"), ("brier", "below", "above")],
)
def test_planted_differences_are_found(name, better, worse):
    strong = [members(N=800, seed=seed, signal=2.5) for seed in range(3)]
    weak = [members(N=800, seed=20 + seed, signal=1.5) for seed in range(3)]
    found = paired_difference(strong, weak, name, replicates=400)
    assert found.verdict(better) == "held"
    assert found.verdict(worse) == "not held"
    alike = [members(N=800, seed=40 + seed, signal=1.5) for seed in range(3)]
    assert paired_difference(alike, weak, name, replicates=400).verdict(better) == "within noise"


def test_planted_diversity_and_calibration_are_found():
    apart = [members(N=800, seed=seed, noise=1.5, common=0.0) for seed in range(3)]
    close = [members(N=800, seed=seed, noise=0.5, common=1.4) for seed in range(3)]
    assert paired_difference(apart, close, "disagreement", replicates=300).verdict("above") == "held"
    assert paired_difference(apart, close, "diversity", replicates=300).verdict("above") == "held"
    sure = [Predictions.from_logits(5 * p.log_probs, p.labels) for p in close]
    assert paired_difference(sure, close, "ece", replicates=300).verdict("above") == "held"


def _pair_of_models(rng, S, N):
    """S seeds of two kinds of network, equally good: each kind finds other examples hard, and so does each seed."""
    hardness = 1 + 1.5 * torch.randn(N, generator=rng)
    kinds = []
    for _ in range(2):
        own = 1.5 * torch.randn(N, generator=rng)
        margins = hardness + own + 0.1 * torch.randn(S, 1, generator=rng) + 0.3 * torch.randn(S, N, generator=rng)
        logits = torch.stack([margins, torch.zeros(S, N)], -1)
        kinds.append([Predictions.from_logits(each, torch.zeros(N, dtype=torch.long)) for each in logits])
    return kinds


def test_intervals_cover_the_truth_if_seeds_share_the_draw_of_examples():
    rng, trials = torch.Generator().manual_seed(0), 40
    covered = {"shared": 0, "own": 0}
    for _ in range(trials):
        first, second = _pair_of_models(rng, S=4, N=100)
        for examples in covered:
            found = paired_difference(first, second, "accuracy", replicates=100, examples=examples)
            covered[examples] += found.lower <= 0 <= found.upper
    assert covered["shared"] >= 36, "about 38 are to be expected"
    assert covered["own"] < covered["shared"], "draws of their own hide what the seeds have in common"


def test_the_mean_member_may_be_either_argument():
    runs = [members(M=4, seed=seed, noise=1.5) for seed in range(2)]
    gain = paired_difference(runs, runs, "nll", replicates=300, mean_member=(False, True))
    assert gain.values == tuple(nll(p) - mean_member(nll, p) for p in runs)
    assert gain.verdict("below") == "held", "Jensen"
    back = paired_difference(runs, runs, "nll", replicates=300, mean_member=(True, False))
    assert (back.lower, back.upper) == pytest.approx((-gain.upper, -gain.lower))
    one = [p.member(2) for p in runs]
    alone = paired_difference(one, runs, "ece", replicates=100, mean_member=(True, True))
    assert alone == paired_difference(one, runs, "ece", replicates=100, mean_member=(False, True))


def test_seeds_with_separate_test_sets():
    first, second = ([members(N=N, seed=seed + N, signal=s) for N in (150, 400)] for seed, s in ((0, 3.0), (9, 1.0)))
    assert paired_difference(first, second, "accuracy", replicates=200, examples="own").verdict("above") == "held"
    with pytest.raises(EnfoldError, match="examples='own'"):
        paired_difference(first, second, "accuracy")


@pytest.mark.parametrize(
    ("lower", "upper", "above", "below"),
    [
        (0.1, 0.3, "held", "not held"),
        (-0.3, -0.1, "not held", "held"),
        (-0.1, 0.3, "within noise", "within noise"),
        (0.0, 0.3, "within noise", "within noise"),
    ],
)
def test_verdicts(lower, upper, above, below):
    found = Difference((lower + upper) / 2, lower, upper, ())
    assert (found.verdict("above"), found.verdict("below")) == (above, below)


def test_an_infinite_score_counts_only_where_it_is_drawn():
    p = Predictions(torch.tensor([[[0.0, -torch.inf], [0.0, -torch.inf]]]), torch.tensor([0, 1]))
    same(replicates("nll", p, torch.tensor([[2, 0], [1, 1]])), [0.0, math.inf])
    with pytest.raises(EnfoldError, match="nll must be finite"):
        paired_difference([p], [p], "nll", replicates=20)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (torch.ones(3, 5), r"counts .*\(3, 5\)"),
        (torch.ones(6), r"counts .*\(6,\)"),
        (torch.zeros(2, 6), "counts"),
        (torch.tensor([[2, 2, 2, 1, 0, -1]]), "counts"),
    ],
)
def test_wrong_counts_are_refused(counts, says):
    with pytest.raises(EnfoldError, match=says):
        replicates("nll", members(N=6), counts)


def test_invalid_inputs_are_refused():
    p = members(N=20)
    with pytest.raises(EnfoldError, match="did you mean 'disagreement'"):
        replicates("disagreements", p, torch.ones(1, 20))
    with pytest.raises(EnfoldError, match=r"name .*'zzz'"):
        metric_value("zzz", p)
    with pytest.raises(EnfoldError, match="at least 2, got 1"):
        replicates("diversity", p.mean(), torch.ones(1, 20))
    with pytest.raises(EnfoldError, match="mean_member"):
        paired_difference([p], [p], "diversity", mean_member=(False, True))
    with pytest.raises(EnfoldError, match=r"first and second .*got 1 and 2"):
        paired_difference([p], [p, p], "nll")
    with pytest.raises(EnfoldError, match=r"first and second .*got 0 and 0"):
        paired_difference([], [], "nll")
    with pytest.raises(EnfoldError, match="labels at index 0"):
        paired_difference([p], [members(N=21)], "nll")
    with pytest.raises(EnfoldError, match="replicates"):
        paired_difference([p], [p], "nll", replicates=0)
    with pytest.raises(EnfoldError, match=r"level=1.5"):
        paired_difference([p], [p], "nll", level=1.5)
    with pytest.raises(EnfoldError, match="examples"):
        paired_difference([p], [p], "nll", examples="each")
    with pytest.raises(EnfoldError, match="size"):
        draw_counts(0, 5, seed=0)
    with pytest.raises(EnfoldError, match="expected"):
        Difference(0.0, 0.0, 0.0, ()).verdict("over")
