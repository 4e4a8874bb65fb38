"""Diversity against accuracy: closed forms of the limits, and points by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enfold.analysis.diversity_plane import (
    compute_disagreement,
    compute_diversity,
    compute_limits,
    flip_fraction,
    independent,
    lower_limit,
)
from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions


def said(*answers: list[int], labels: list[int], classes: int = 3) -> Predictions:
    logits = torch.nn.functional.one_hot(torch.tensor(answers), classes).double() * 5
    return Predictions.from_logits(logits, torch.tensor(labels))


def test_points_by_hand() -> None:
    labels = [0, 1, 2, 0]
    base = said([0, 1, 2, 1], labels=labels)
    others = said([0, 1, 2, 1], [0, 1, 1, 0], [0, 1, 2, 0], [1, 2, 0, 1], labels=labels)
    a, y = compute_diversity(base, others)
    assert a.tolist() == [0.75, 0.75, 1.0, 0.0]
    assert y.tolist() == [0.0, 2.0, float("inf"), 0.75]  # differences 0, 2/4, 1/4, 3/4
    with pytest.raises(EnfoldError, match="base must be one network"):
        compute_diversity(others, others)


@given(st.integers(2, 50), st.floats(1e-6, 1), st.floats(0, 1))  # nearer to chance, limit (3) is rounding over rounding
def test_the_upper_limit_is_above_the_lower(classes: int, base: float, along: float) -> None:
    base = 1 / classes + (0.999 - 1 / classes) * base
    a = torch.tensor([1 / classes + along * (base - 1 / classes)], dtype=torch.float64)
    assert float(independent(a, base, classes)) >= float(flip_fraction(a, base, classes)) - 1e-9


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_at_chance_independent_networks_differ_by_chance(classes: int) -> None:
    chance = torch.tensor([1 / classes], dtype=torch.float64)
    expected = torch.tensor([(classes - 1) / classes], dtype=torch.float64)
    torch.testing.assert_close(independent(chance, 1 / classes, classes), expected)
    torch.testing.assert_close(independent(chance, 0.7, classes), expected)
    torch.testing.assert_close(flip_fraction(chance, 0.7, classes), expected)


def test_limits_agree_with_simulated_networks() -> None:
    rng, n, classes, base, a = torch.Generator().manual_seed(0), 200_000, 5, 0.8, 0.6
    labels = torch.zeros(n, dtype=torch.long)

    def answers(accuracy: float) -> torch.Tensor:
        wrong = torch.randint(1, classes, (n,), generator=rng)
        return torch.where(torch.rand(n, generator=rng) < accuracy, labels, wrong)

    first, second = answers(base), answers(a)
    expected = float(independent(torch.tensor([a], dtype=torch.float64), base, classes))
    assert float((first != second).double().mean()) == pytest.approx(expected, abs=0.005)
    part = float(flip_fraction(torch.tensor([a], dtype=torch.float64), base, classes))
    other = (first + torch.randint(1, classes, (n,), generator=rng)) % classes
    changed = torch.where(torch.rand(n, generator=rng) < part, other, first)
    assert float((changed == labels).double().mean()) == pytest.approx(a, abs=0.005)


def test_limits_from_chance_to_the_base() -> None:
    found = compute_limits(0.9, 10, points=5)
    assert found.accuracy[0] == pytest.approx(0.1)
    assert found.accuracy[-1] == pytest.approx(0.9)
    assert float(found.lower[-1]) == 0
    assert float(lower_limit(torch.tensor([0.95], dtype=torch.float64), 0.9, 10)) == 0
    torch.testing.assert_close(found.upper[0], found.lower[0])
    for wrong in (1.0, 0.05):
        with pytest.raises(EnfoldError, match="base_accuracy"):
            compute_limits(wrong, 10)


def test_disagreement_with_a_base() -> None:
    labels = [0, 0, 0]
    base = said([0, 1, 2], labels=labels)
    assert compute_disagreement(base, said([0, 1, 2], [1, 1, 1], labels=labels)).tolist() == pytest.approx([0, 2 / 3])
