"""Votes: worked by hand, and against the binomial tail of independent voters."""

import pytest
import torch

from enfold.metrics import majority_vote_accuracy
from enfold.metrics.predictions import Predictions
from enfold.metrics.vote import majority_vote, vote_accuracy


def predictions(probs, labels):
    return Predictions(torch.tensor(probs, dtype=torch.float64).log(), torch.tensor(labels))


def test_a_majority_outvotes_a_confident_member():
    p = predictions([[[0.98, 0.01, 0.01]], [[0.3, 0.6, 0.1]], [[0.2, 0.7, 0.1]]], [1])
    assert majority_vote(p).tolist() == [1]
    assert int(p.mean().log_probs.argmax()) == 0
    assert vote_accuracy(p) == 1.0


def test_the_mean_probability_decides_between_equal_counts_only():
    p = predictions([[[0.9, 0.05, 0.05]], [[0.1, 0.5, 0.4]], [[0.05, 0.05, 0.9]]], [0])
    assert majority_vote(p).tolist() == [2], "all have one vote; class 2 has the highest mean"
    two = predictions([[[0.6, 0.0001, 0.3999]], [[0.0001, 0.55, 0.4499]]], [2])
    assert majority_vote(two).tolist() == [0], "class 2 has a mean of 0.42 and no vote"


@pytest.mark.parametrize(("members", "error"), [(3, 0.3), (5, 0.3), (5, 0.6)])
def test_independent_voters_follow_the_binomial_tail(members, error):
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(members, 50_000, generator=generator) < error
    logits = torch.nn.functional.one_hot(wrong.long(), 2) * 3.0
    p = Predictions.from_logits(logits, torch.zeros(50_000, dtype=torch.long))
    assert vote_accuracy(p) == pytest.approx(majority_vote_accuracy(members, error), abs=0.01)


def test_one_member_decides():
    p = Predictions.from_logits(torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4)
    assert majority_vote(p).tolist() == p.log_probs[0].argmax(-1).tolist()
