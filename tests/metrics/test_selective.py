"""Risk over coverage by hand and by brute force over the orders of ties; how the figures are related."""

import math
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from enfold.errors import EnfoldError
from enfold.metrics import (
    accuracy,
    aurc,
    draw_counts,
    excess_aurc,
    misclassification_auroc,
    paired_difference,
    prr,
    replicates,
    risk_coverage,
    selective,
)
from enfold.metrics.predictions import Predictions

prop = settings(derandomize=True, max_examples=25)


def answers(confidences, right):
    """Two classes; class 0 is predicted with the given confidence."""
    probs = torch.tensor([[c, 1 - c] for c in confidences], dtype=torch.float64)
    return Predictions(probs.log()[None], torch.tensor([0 if r else 1 for r in right]))


def test_by_hand():
    p = answers([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
    curve = risk_coverage(p)
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert aurc(p) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert excess_aurc(p) == pytest.approx(aurc(p) - (0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert misclassification_auroc(p) == 0.75
    assert prr(p) == pytest.approx(0.5)


@prop
@given(st.lists(st.tuples(st.sampled_from([0.6, 0.7, 0.8]), st.booleans()), min_size=1, max_size=5))
def test_ties_are_the_mean_over_their_orders(examples):
    p = answers(*zip(*examples, strict=True))
    risks = []
    for order in permutations(range(len(examples))):
        if all(examples[a][0] >= examples[b][0] for a, b in pairwise(order)):
            wrong = [1 - examples[i][1] for i in order]
            risks.append([sum(wrong[:i]) / i for i in range(1, len(wrong) + 1)])
    expected = torch.tensor(risks, dtype=torch.float64).mean(0)
    torch.testing.assert_close(risk_coverage(p).risk, expected)


@prop
@given(p=st.from_type(Predictions))
def test_relations_between_the_scores(p):
    curve = risk_coverage(p)
    assert curve.risk[-1].item() == pytest.approx(1 - accuracy(p))  # all kept
    assert 0 <= excess_aurc(p) <= aurc(p) + 1e-12
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(1))
    assert aurc(Predictions(p.log_probs[:, order], p.labels[order])) == pytest.approx(aurc(p))
    if 0 < accuracy(p) < 1:
        assert prr(p) == pytest.approx(2 * misclassification_auroc(p) - 1)
    else:
        assert math.isnan(prr(p))
        assert math.isnan(misclassification_auroc(p))


def test_best_random_and_worst():
    wrong = torch.tensor([0.0] * 8 + [1.0] * 2)
    p = answers([0.8] * 10, 1 - wrong)
    best, worst = selective(p, wrong), selective(p, -wrong)
    assert best == pytest.approx({**best, "excess_aurc": 0, "prr": 1, "misclassification_auroc": 1})
    assert worst == pytest.approx({**worst, "prr": -1, "misclassification_auroc": 0})
    assert selective(p)["prr"] == pytest.approx(0)  # all equally sure: a random order
    assert aurc(p) == pytest.approx(0.2)


@prop
@given(p=st.from_type(Predictions), seed=st.integers(0, 5))
def test_a_replicate_is_the_aurc_of_the_examples_drawn(p, seed):
    counts = draw_counts(len(p), 3, seed)
    found = replicates("aurc", p, counts)
    for value, count in zip(found, counts, strict=True):
        drawn = torch.arange(len(p)).repeat_interleave(count.long())
        again = Predictions(p.log_probs[:, drawn], p.labels[drawn])
        assume(len(again))
        assert value.item() == pytest.approx(aurc(again), abs=1e-12)


def test_replicates_may_be_of_different_sizes():
    p = answers([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
    counts = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 3, 2, 2]])
    expected = [1 / 4 * (0 + 1 / 2 + 1 / 3 + 2 / 4), 1 / 2 * (0 + 1 / 2), 1 / 7 * (3 + 3 / 4 + 3 / 5 + 4 / 6 + 5 / 7)]
    torch.testing.assert_close(replicates("aurc", p, counts), torch.tensor(expected, dtype=torch.float64))


def test_an_interval_of_a_difference():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (400,), generator=draw)
    logits = torch.randn(400, 3, generator=draw)
    good = Predictions.from_logits(logits + 3 * torch.nn.functional.one_hot(labels, 3), labels)
    bad = Predictions.from_logits(logits, labels)
    found = paired_difference([good], [bad], "aurc", replicates=200)
    assert found.lower < found.mean < found.upper < 0
    assert found.verdict("below") == "held"


def test_another_shape_is_refused():
    with pytest.raises(EnfoldError, match="uncertainty"):
        aurc(answers([0.9, 0.8], [1, 0]), torch.ones(3))
