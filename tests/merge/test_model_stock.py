"""Model Stock, with the formulas in plain numpy."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from enfold.merge import model_stock
from enfold.merge.model_stock import ratio
from fine_tuned import family, flat, merged


def reference(base: np.ndarray, each: list[np.ndarray]) -> np.ndarray:
    vectors = [(one - base).ravel() for one in each]
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(vectors, 2)]
    cos, count = max(0, np.mean(cosines)), len(each)
    t = count * cos / (1 + (count - 1) * cos)
    return t * np.mean(each, axis=0) + (1 - t) * base


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_formula(count):
    base, members = family(count=count)
    found, origin, each = flat(merged("model_stock", members, base)), flat(base), list(map(flat, members))
    for name, start in origin.items():
        expected = reference(start.numpy(), [one[name].numpy() for one in each])
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_orthogonal_changes_give_the_base_and_equal_ones_the_member():
    base, one, other = (nn.Linear(2, 1, bias=False) for _ in range(3))
    with torch.no_grad():
        base.weight.zero_()
        one.weight.copy_(torch.tensor([[1.0, 0.0]]))
        other.weight.copy_(torch.tensor([[0.0, 3.0]]))
    assert torch.equal(model_stock([one, other], base=base).weight, base.weight)
    assert torch.equal(model_stock([one, one], base=base).weight, one.weight)


def test_the_ratio_of_changes_at_60_degrees():
    vectors = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]])
    assert ratio(vectors) == pytest.approx(2 * 0.5 / 1.5)
    assert ratio(torch.zeros(3, 4)) == 1.0
    assert ratio(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == 0.0
