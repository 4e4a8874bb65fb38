import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, top_k_accuracy_score
from torchmetrics.functional.classification import multiclass_accuracy

from enfold.errors import EnfoldError
from enfold.metrics import (
    METRICS,
    accuracy,
    brier,
    example_brier,
    example_correct,
    example_nll,
    gibbs_nll,
    mean_member,
    nll,
    per_member,
    top_k_accuracy,
)
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)


def random_predictions(M=3, N=200, C=7, seed=0, scale=2.0):
    rng = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(M, N, C, generator=rng, dtype=torch.float64)
    return Predictions.from_logits(logits, torch.randint(C, (N,), generator=rng))


def of_probs(probs, labels):
    return Predictions(torch.tensor(probs, dtype=torch.float64).log(), torch.tensor(labels))


def three_examples():
    """Two members, three examples, two classes, worked by hand: p̄ = (.7, .3), (.4, .6), (.5, .5)."""
    return of_probs([[[0.8, 0.2], [0.2, 0.8], [0.5, 0.5]], [[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]], [0, 0, 1])


def test_three_examples_by_hand():
    p = three_examples()
    assert accuracy(p) == pytest.approx(1 / 3)  # right, wrong, and a tie that goes to class 0
    assert nll(p) == pytest.approx(-(math.log(0.7) + math.log(0.4) + math.log(0.5)) / 3)
    assert gibbs_nll(p) == pytest.approx(-math.log(0.8 * 0.6 * 0.2 * 0.6 * 0.5 * 0.5) / 6)
    assert brier(p) == pytest.approx((2 * 0.3**2 + 2 * 0.6**2 + 2 * 0.5**2) / 3)
    torch.testing.assert_close(per_member(accuracy, p), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert mean_member(accuracy, p) == pytest.approx(0.5)


def test_agrees_with_scikit_learn():
    p = random_predictions()
    probs = p.log_probs.exp().mean(0).numpy()
    labels, classes = p.labels.numpy(), list(range(p.num_classes))
    assert accuracy(p) == pytest.approx(accuracy_score(labels, probs.argmax(1)), abs=1e-15)
    assert nll(p) == pytest.approx(log_loss(labels, probs, labels=classes), rel=1e-12)
    for k in (1, 2, 5):
        assert top_k_accuracy(p, k) == pytest.approx(top_k_accuracy_score(labels, probs, k=k, labels=classes))


def test_brier_is_twice_the_binary_score_of_scikit_learn():
    p = random_predictions(C=2)
    probs = p.log_probs.exp().mean(0).numpy()
    assert brier(p) == pytest.approx(2 * brier_score_loss(p.labels.numpy(), probs[:, 1]), rel=1e-12)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_k_agrees_with_torchmetrics(k):
    p = random_predictions(seed=1)
    probs = p.log_probs.exp().mean(0)
    expected = multiclass_accuracy(probs, p.labels, num_classes=7, average="micro", top_k=k)
    assert top_k_accuracy(p, k) == pytest.approx(expected.item(), abs=1e-6)


def test_ties_go_to_the_lowest_index():
    even = torch.full((1, 4, 4), 0.25).log()
    p = Predictions(even, torch.arange(4))
    assert accuracy(p) == 0.25
    assert [top_k_accuracy(p, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_perfect_predictor():
    labels = torch.tensor([0, 1, 2, 1])
    p = Predictions(torch.nn.functional.one_hot(labels, 3).float().log()[None], labels)
    assert (accuracy(p), nll(p), gibbs_nll(p), brier(p)) == (1.0, 0.0, 0.0, 0.0)
    assert math.copysign(1.0, nll(p)) == 1.0  # a table must not print -0.0


@pytest.mark.parametrize("C", [2, 3, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_predictor(C, dtype):
    p = Predictions.from_logits(torch.zeros(2, 5, C, dtype=dtype), torch.arange(5) % C)
    assert nll(p) == pytest.approx(math.log(C), rel=1e-14)
    assert brier(p) == pytest.approx(1 - 1 / C, rel=1e-12)


def test_a_label_of_probability_zero_has_infinite_nll():
    p = of_probs([[[1.0, 0.0]], [[0.5, 0.5]]], [1])
    assert nll(p) == pytest.approx(-math.log(0.25))
    assert gibbs_nll(p) == math.inf


def test_float64_is_used_for_float32_predictions():
    p = random_predictions(N=2000)
    rounded = Predictions(p.log_probs.float(), p.labels)
    assert nll(rounded) == pytest.approx(nll(p), abs=1e-8)


@prop
@given(p=st.from_type(Predictions))
def test_ensemble_is_never_worse_than_its_average_member(p):
    assert nll(p) <= gibbs_nll(p) + 1e-12
    assert brier(p) <= mean_member(brier, p) + 1e-12
    assert gibbs_nll(p) == pytest.approx(mean_member(nll, p), rel=1e-12, abs=1e-15)


@prop
@given(p=st.from_type(Predictions), seed=st.integers(0, 100))
def test_order_of_examples_and_members_does_not_matter(p, seed):
    rng = torch.Generator().manual_seed(seed)
    examples = torch.randperm(len(p), generator=rng)
    members = torch.randperm(p.num_members, generator=rng)
    q = Predictions(p.log_probs[:, examples][members], p.labels[examples])
    for name in ("nll", "gibbs_nll", "brier"):
        assert METRICS[name](q) == pytest.approx(METRICS[name](p), rel=1e-12, abs=1e-15)
    shuffled = Predictions(p.log_probs[:, examples], p.labels[examples])
    assert accuracy(shuffled) == pytest.approx(accuracy(p))


@prop
@given(p=st.from_type(Predictions))
def test_identical_members_score_as_one(p):
    p = p.member(0)
    copies = Predictions(p.log_probs.expand(3, -1, -1), p.labels)
    for name in ("accuracy", "nll", "gibbs_nll", "brier"):
        assert METRICS[name](copies) == pytest.approx(METRICS[name](p), rel=1e-12, abs=1e-14)


@prop
@given(p=st.from_type(Predictions))
def test_ranges(p):
    assert 0 <= accuracy(p) <= top_k_accuracy(p, 2) <= top_k_accuracy(p, p.num_classes) == 1
    assert nll(p) >= 0
    assert 0 <= brier(p) <= 2 + 1e-12


def test_scores_are_means_over_examples():
    p = random_predictions()
    for score, mean in ((example_correct, accuracy), (example_nll, nll), (example_brier, brier)):
        assert score(p).shape == (len(p),)
        assert score(p).dtype == torch.float64
        assert score(p).mean().item() == mean(p)
    assert per_member(example_nll, p).shape == (3, 200)
    assert per_member(example_nll, p).mean().item() == pytest.approx(gibbs_nll(p), rel=1e-12)


@pytest.mark.parametrize("k", [0, 8])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(EnfoldError, match=rf"k must .*got {k}"):
        top_k_accuracy(random_predictions(), k)


def test_invalid_labels_are_refused():
    log_probs = torch.zeros(1, 2, 3).log_softmax(-1)
    with pytest.raises(EnfoldError, match=r"labels .*got 3"):
        nll(Predictions(log_probs, torch.tensor([0, 3])))
    with pytest.raises(EnfoldError, match="got -100"):
        accuracy(Predictions(log_probs, torch.tensor([0, -100])))
    with pytest.raises(EnfoldError, match=r"labels\.long\(\)"):
        brier(Predictions(log_probs, torch.tensor([0.0, 1.0])))


def test_empty_predictions_are_refused():
    with pytest.raises(EnfoldError, match="log_probs"):
        nll(Predictions(torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.long)))


def test_registry_describes_every_metric():
    p = random_predictions()
    assert list(METRICS) == [
        "accuracy",
        "nll",
        "gibbs_nll",
        "brier",
        "ece",
        "adaptive_ece",
        "classwise_ece",
        "mce",
    ]
    for name, metric in METRICS.items():
        assert metric.name == name == metric.function.__name__
        assert metric.description
        assert isinstance(metric(p), float)
        assert metric.scale == (100.0 if metric.unit == "%" else 1.0)
    assert [name for name, metric in METRICS.items() if metric.higher_is_better] == ["accuracy"]


def test_predictions_are_not_modified():
    p = random_predictions()
    before = p.log_probs.clone()
    for metric in METRICS.values():
        metric(p)
    torch.testing.assert_close(p.log_probs, before, rtol=0, atol=0)
