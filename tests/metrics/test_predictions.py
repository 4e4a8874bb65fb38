"""Predictions: normalised log-probabilities with a member axis from any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enfold import EnfoldError, Predictions
from enfold.metrics.predictions import mean_log_probs

LABELS = torch.tensor([0, 2])


def log_probs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_the_mean_is_hand_worked():
    p = Predictions(log_probs([[0.5, 0.5]], [[0.1, 0.9]]), torch.tensor([1]))
    assert (p.num_members, p.num_classes, len(p)) == (2, 2, 1)
    torch.testing.assert_close(p.mean().log_probs.exp(), torch.tensor([[[0.3, 0.7]]], dtype=torch.float64))
    assert p.mean().num_members == 1
    assert torch.equal(p.mean().labels, p.labels)


@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=m, max_size=m)
    )
)
def test_the_mean_of_members_is_normalised_and_between_them(logits):
    p = Predictions.from_logits(torch.tensor(logits, dtype=torch.float64)[:, None], torch.tensor([1]))
    mean = p.mean().log_probs
    torch.testing.assert_close(mean.exp().sum(-1), torch.ones(1, 1, dtype=torch.float64))
    assert (mean[0] <= p.log_probs.max(0).values + 1e-9).all()
    assert (mean[0] >= p.log_probs.min(0).values - 1e-9).all()


def test_a_mean_survives_probabilities_of_zero():
    mean = mean_log_probs(log_probs([[1.0, 0.0]], [[0.0, 1.0]]))
    torch.testing.assert_close(mean, torch.full((1, 2), math.log(0.5), dtype=torch.float64))
    both = mean_log_probs(log_probs([[1.0, 0.0]], [[1.0, 0.0]]))
    assert both.tolist() == [[0.0, -math.inf]]


def test_logits_of_one_network_get_a_member_axis():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    p = Predictions.from_logits(logits, LABELS)
    assert p.log_probs.shape == (1, 2, 3)
    torch.testing.assert_close(p.log_probs[0, 1], torch.full((3,), -math.log(3)))
    assert torch.equal(p.log_probs, Predictions.from_logits(logits[None], LABELS).log_probs)
    assert torch.equal(Predictions.from_logits(logits + 100, LABELS).log_probs.argmax(-1), p.log_probs.argmax(-1))


def test_members_are_taken_out_by_number():
    p = Predictions.from_logits(torch.randn(3, 2, 3), LABELS)
    assert torch.equal(p.member(-1).log_probs, p.log_probs[2:])
    assert torch.equal(p.subset([2, 0]).log_probs, p.log_probs[[2, 0]])
    assert torch.equal(p.subset(range(2)).mean().log_probs[0], mean_log_probs(p.log_probs[:2]))


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        (torch.zeros(2, 3), LABELS, r"log_probs .*\(2, 3\)"),
        (torch.zeros(1, 2, 3, 1), LABELS, r"log_probs .*\(1, 2, 3, 1\)"),
        (torch.zeros(1, 2, 3).log_softmax(-1), torch.tensor([0]), r"labels .*\(1,\)"),
        (torch.zeros(1, 2, 3).log_softmax(-1), LABELS[:, None], r"labels .*\(2, 1\)"),
        (torch.full((1, 2, 3), math.nan), LABELS, "log_probs .*NaN"),
        (torch.full((1, 2, 3), -math.inf), LABELS, "log_probs .*NaN"),
        (torch.zeros(1, 2, 3), LABELS, r"log_probs .*3.*Predictions\.from_logits"),
        (torch.full((1, 2, 3), -2.0), LABELS, r"log_probs .*0\.406"),
    ],
)
def test_invalid_predictions_are_refused(values, labels, message):
    with pytest.raises(EnfoldError, match=message):
        Predictions(values, labels)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(EnfoldError, match="log_probs"):
        Predictions.from_logits(torch.tensor([[1.0, math.nan, 0.0]] * 2), LABELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_is_normalised(dtype):
    p = Predictions.from_logits(torch.linspace(-4, 4, 30).view(1, 2, 15).to(dtype), LABELS)
    assert p.log_probs.dtype == dtype
    assert p.mean().num_classes == 15
