"""Task arithmetic: the base plus the scaled sum of task vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold import merge
from enfold.errors import EnfoldError
from fine_tuned import family, flat, merged


@pytest.mark.parametrize("scale", [None, -0.2, 0.3, 1.0])
def test_the_formula(scale):
    base, members = family(count=3)
    found, origin, each = (
        flat(merged("task_arithmetic", members, base, scale=scale)),
        flat(base),
        list(map(flat, members)),
    )
    for name, start in origin.items():
        total = sum(one[name] - start for one in each)
        expected = start + (1 / 3 if scale is None else scale) * total
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)


def test_variances_stay_positive_beyond_the_mean():
    base, members = family()
    found = merged("task_arithmetic", members, base, scale=-5.0, repair="none")
    torch.testing.assert_close(found.norm.running_var, base.norm.running_var)


def test_the_scale_is_chosen_on_validation_examples():
    inputs = torch.randn(60, 3)
    base, one, other = (nn.Linear(3, 1) for _ in range(3))
    with torch.no_grad():
        weight = base.weight + 0.7 * (one.weight + other.weight - 2 * base.weight)
        bias = base.bias + 0.7 * (one.bias + other.bias - 2 * base.bias)
        targets = inputs @ weight.T + bias
    options = {"base": base, "task": "regression", "choose": True}
    found = merge.task_arithmetic([one, other], val=(inputs, targets), **options)
    torch.testing.assert_close(found.weight, weight)
    with pytest.raises(EnfoldError, match="val"):
        merge.task_arithmetic([one, other], (inputs, targets), **options)
