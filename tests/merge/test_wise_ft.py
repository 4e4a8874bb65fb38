"""The line from the base to the mean of the members."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from enfold import merge
from enfold.errors import EnfoldError
from fine_tuned import family, flat, images, merged


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("count", [1, 3])
def test_the_formula(alpha, count):
    base, members = family(count=count)
    found, origin, each = flat(merged("wise_ft", members, base, alpha=alpha)), flat(base), list(map(flat, members))
    for name, start in origin.items():
        mean = sum(one[name] for one in each) / count
        torch.testing.assert_close(found[name], (1 - alpha) * start + alpha * mean, rtol=1e-5, atol=1e-6)


def test_alpha_is_the_best_on_validation_examples():
    torch.manual_seed(0)
    inputs = torch.randn(200, 4)
    labels = inputs[:, :3].argmax(1)
    base, member = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        base.weight.zero_()
        member.weight.copy_(4 * torch.eye(3, 4) + 4 * torch.randn(3, 4))  # better than chance, and too sure

    @torch.no_grad()
    def loss(alpha: float) -> float:
        return float(cross_entropy(inputs @ torch.lerp(base.weight, member.weight, alpha).T, labels))

    best = min((index / 10 for index in range(11)), key=loss)
    found = merge.wise_ft([member], val=(inputs, labels), base=base)
    torch.testing.assert_close(found.weight, torch.lerp(base.weight, member.weight, best))
    assert 0 < best < 1


def test_the_task_may_be_a_regression():
    inputs = torch.randn(50, 3)
    base, member = nn.Linear(3, 1), nn.Linear(3, 1)
    targets = torch.lerp(base(inputs), member(inputs), 0.3).detach()
    found = merge.wise_ft([member], val=(inputs, targets), base=base, task="regression")
    torch.testing.assert_close(found.weight, torch.lerp(base.weight, member.weight, 0.3))


def test_validation_examples_are_needed_to_choose():
    base, members = family()
    with pytest.raises(EnfoldError, match="alpha"):
        merge.wise_ft(members, images(), base=base)
