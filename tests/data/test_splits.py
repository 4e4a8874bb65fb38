import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedShuffleSplit

from enfold.data.splits import proportional, resolve_size, stratified_split
from enfold.errors import EnfoldError

prop = settings(deadline=None, derandomize=True, max_examples=25)
labels_and_size = st.lists(st.integers(0, 5), min_size=2, max_size=60).flatmap(
    lambda labels: st.tuples(st.just(torch.tensor(labels)), st.integers(1, len(labels) - 1))
)


@prop
@given(labels_and_size, st.integers(0, 2**40))
def test_the_two_sides_are_a_partition_of_the_requested_size(case, seed):
    labels, size = case
    rest, held_out = stratified_split(labels, size, seed)
    assert len(held_out) == size
    assert sorted(rest.tolist() + held_out.tolist()) == list(range(len(labels)))
    assert rest.tolist() == sorted(rest.tolist())


@prop
@given(labels_and_size, st.integers(0, 2**40))
def test_every_class_retains_an_example_if_possible(case, seed):
    labels, size = case
    classes = labels.unique()
    rest, _ = stratified_split(labels, size, seed)
    if size <= len(labels) - len(classes):
        assert labels[rest].unique().tolist() == classes.tolist()


@prop
@given(st.lists(st.integers(2, 50), min_size=2, max_size=8), st.data())
def test_class_counts_are_within_one_of_exact_proportion(counts, data):
    size = data.draw(st.integers(1, sum(counts) // 2))
    shares = proportional(counts, size)
    assert sum(shares) == size
    for count, share in zip(counts, shares, strict=True):
        assert abs(share - count * size / sum(counts)) < 1


def test_class_counts_by_hand():
    assert proportional([6, 3, 1], 5) == [3, 2, 0]  # quotas 3, 1.5, 0.5: the last one keeps its only example
    assert proportional([10, 10, 10], 10) == [4, 3, 3]
    assert proportional([1, 1, 1], 2) == [1, 1, 0]
    assert proportional([0, 4, 4], 2) == [0, 1, 1]


def test_class_counts_agree_with_scikit_learn():
    labels = torch.arange(10).repeat_interleave(torch.tensor([30, 40, 50, 60, 70, 80, 90, 100, 110, 120]))
    _, held_out = stratified_split(labels, 150, 0)
    _, theirs = next(StratifiedShuffleSplit(1, test_size=150, random_state=0).split(labels, labels))
    assert torch.bincount(labels[held_out]).tolist() == torch.bincount(labels[torch.from_numpy(theirs)]).tolist()


def test_the_seed_determines_the_split():
    labels = torch.arange(200) % 10
    first = stratified_split(labels, 50, 3)[1].tolist()
    assert first == stratified_split(labels, 50, 3)[1].tolist()
    assert first != stratified_split(labels, 50, 4)[1].tolist()


def test_every_example_is_held_out_equally_often():
    labels = torch.arange(40) % 4
    times = torch.zeros(40)
    for seed in range(400):
        times[stratified_split(labels, 10, seed)[1]] += 1
    assert times.sum() == 4000
    assert 60 < times.min() <= times.max() < 140  # binomial(400, 1/4): 100 ± 8.7, here 4.6 deviations


@pytest.mark.parametrize("size", [0, -1, 10, 11])
def test_refuses_sizes_that_leave_one_side_empty(size):
    with pytest.raises(EnfoldError, match=rf"size .*got {size}"):
        stratified_split(torch.zeros(10, dtype=torch.long), size, 0)


def test_sizes_are_numbers_or_fractions():
    assert resolve_size(7, 100, "it") == 7
    assert resolve_size(0.25, 100, "it") == 25
    assert resolve_size(100, 100, "it") == 100


@pytest.mark.parametrize("size", [0, -3, 1.0, 1.5, -0.1, 0.001, True])
def test_refuses_other_types(size):
    with pytest.raises(EnfoldError, match="it must be a number of examples or a fraction"):
        resolve_size(size, 100, "it")


def test_refuses_more_than_the_number_of_examples():
    with pytest.raises(EnfoldError, match="it must be at most 100"):
        resolve_size(101, 100, "it")
