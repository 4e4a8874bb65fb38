"""Greedy selection: hand-worked pools, the published pitfalls, and what holds for every pool."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, nll
from enfold.metrics.greedy import Selected, greedy_selection
from enfold.metrics.predictions import Predictions


def pool_of(*label_probs, labels=None):
    """Two classes; each candidate is given by its probability of the label of each example."""
    own = torch.tensor(label_probs, dtype=torch.float64)
    labels = torch.zeros(own.shape[1], dtype=torch.long) if labels is None else labels
    probs = torch.stack([own, 1 - own], dim=-1)
    probs = torch.where(labels[:, None] == 0, probs, probs.flip(-1))
    return Predictions(probs.log(), labels)


def random_pool(seed, candidates=6, examples=20, classes=3):
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(candidates, examples, classes, generator=source)
    return Predictions.from_logits(logits, torch.randint(classes, (examples,), generator=source))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), goal=st.sampled_from(["nll", "accuracy", "nll-accuracy"]), size=st.integers(1, 6))
def test_scores_fall_and_are_those_of_the_mean_of_the_picks(seed, goal, size):
    pool = random_pool(seed)
    found = greedy_selection(pool, size, goal)
    assert all(later < earlier for earlier, later in zip(found.scores, found.scores[1:], strict=False))
    assert 1 <= len(found.counts) <= size
    for length, score in enumerate(found.scores, start=1):
        mean = pool.subset(found.picks[:length])
        expected = {"nll": nll(mean), "accuracy": -accuracy(mean), "nll-accuracy": nll(mean) - accuracy(mean)}[goal]
        assert score == pytest.approx(expected, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_each_pick_is_the_best_of_all_candidates(seed):
    pool = random_pool(seed)
    found = greedy_selection(pool, 4)
    for length in range(len(found.picks)):
        tried = [nll(pool.subset([*found.picks[:length], index])) for index in range(pool.num_members)]
        assert found.picks[length] == tried.index(min(tried)) or found.scores[length] == pytest.approx(min(tried))
    if len(found.counts) < 4:  # it stopped because nothing helps
        assert min(nll(pool.subset([*found.picks, k])) for k in range(pool.num_members)) >= found.scores[-1] - 1e-12


def test_one_candidate_is_returned():
    assert greedy_selection(pool_of([0.6, 0.3]), 4).picks == (0,)


def test_duplicates_count_as_often_as_they_were_selected():
    found = Selected((2, 7, 3, 3), (0.4, 0.3, 0.2, 0.1))
    assert found.counts == {2: 1, 7: 1, 3: 2}
    assert found.weights == {2: 1 / 4, 7: 1 / 4, 3: 1 / 2}


def test_a_good_candidate_is_selected_again():
    pool = pool_of([0.9, 0.9, 0.9, 0.1], [0.1, 0.1, 0.1, 0.9], [0.5, 0.5, 0.5, 0.5])
    # alone: nll of 0 is 0.655, of 2 is 0.693; 0 with 1 is 0.693, 0 with 2 is 0.613: then 0 again is best
    found = greedy_selection(pool, 3)
    assert found.picks[:3] == (0, 2, 0)
    assert len(found.picks) > len(found.counts)
    assert greedy_selection(pool, 2).picks == (0, 2)


def test_accuracy_is_maximised():
    pool = pool_of([0.9, 0.9, 0.9], [0.1, 0.1, 0.1])  # the public code would take the second, which is always wrong
    assert greedy_selection(pool, 1, "accuracy").picks == (0,)
    assert greedy_selection(pool, 1, "accuracy").scores == (-1.0,)
    confident = pool_of([0.999, 0.999, 0.001], [0.51, 0.51, 0.51])
    assert greedy_selection(confident, 1, "accuracy").picks == (1,)
    assert greedy_selection(confident, 1, "nll").picks == (1,)
    # nll: 0.233 and 0.511; accuracy: 2/3 and 1, so that their difference prefers the second
    unsure = pool_of([0.99, 0.99, 0.49], [0.6, 0.6, 0.6])
    assert [greedy_selection(unsure, 1, goal).picks for goal in ("nll", "nll-accuracy")] == [(0,), (1,)]


def test_a_candidate_is_selected_even_if_all_have_infinite_nll():
    pool = Predictions(torch.tensor([[[0.0, -math.inf]], [[0.0, -math.inf]]]), torch.tensor([1]))
    assert greedy_selection(pool, 2) == Selected((0,), (math.inf,))


def test_a_pool_of_several_predictors_is_one_pool():
    pool = random_pool(3)
    parts = [pool.subset([0, 1]), pool.member(2), pool.subset([3, 4, 5])]
    assert greedy_selection(parts, 3) == greedy_selection(pool, 3)


def test_the_list_has_the_requested_length():
    pool = pool_of([0.9, 0.9, 0.9, 0.1], [0.1, 0.1, 0.1, 0.9], [0.5, 0.5, 0.5, 0.5])
    assert len(greedy_selection(pool, 3, max_picks=3).picks) == 3


def test_invalid_inputs():
    pool = random_pool(0)
    with pytest.raises(EnfoldError, match="num_members"):
        greedy_selection(pool, 0)
    with pytest.raises(EnfoldError, match="goal"):
        greedy_selection(pool, 2, "acc")
    with pytest.raises(EnfoldError, match="pool"):
        greedy_selection([], 2)
    with pytest.raises(EnfoldError, match="max_picks"):
        greedy_selection(pool, 2, max_picks=1)
    with pytest.raises(EnfoldError, match="candidate 1"):
        greedy_selection([pool, Predictions(pool.log_probs, (pool.labels + 1) % 3)], 2)
