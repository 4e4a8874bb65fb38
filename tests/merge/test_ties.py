"""TIES, with loops over entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enfold.merge.ties import disjoint_mean, trim
from fine_tuned import family, flat, merged


def reference(vectors: list[np.ndarray], density: float) -> np.ndarray:
    trimmed = []
    for vector in vectors:
        used = max(1, round(density * len(vector)))
        largest = np.argsort(-np.abs(vector), kind="stable")[:used]
        trimmed.append(np.where(np.isin(np.arange(len(vector)), largest), vector, 0))
    merged_entries = np.zeros(len(vectors[0]))
    for index in range(len(vectors[0])):
        values = [vector[index] for vector in trimmed]
        agreeing = [value for value in values if value * sum(values) > 0]
        merged_entries[index] = np.mean(agreeing) if agreeing else 0
    return merged_entries


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_formula(density, scale):
    base, members = family(count=3)
    found, origin = flat(merged("ties", members, base, density=density, scale=scale)), flat(base)
    names = list(origin)
    vectors = [
        torch.cat([(dict(member.named_parameters())[n] - dict(base.named_parameters())[n]).flatten() for n in names])
        for member in members
    ]
    expected = reference([vector.detach().double().numpy() for vector in vectors], density)
    change = torch.cat([(found[name] - origin[name]).flatten() for name in names]).numpy()
    np.testing.assert_allclose(change, scale * expected, rtol=1e-4, atol=1e-6)


def test_the_published_steps_by_hand():
    vectors = torch.tensor([[4.0, -1.0, 0.1, 2.0], [-1.0, -3.0, 0.2, -2.0]])
    trimmed = torch.stack([trim(vector, 0.75) for vector in vectors])
    assert torch.equal(trimmed, torch.tensor([[4.0, -1.0, 0.0, 2.0], [-1.0, -3.0, 0.0, -2.0]]))
    assert torch.equal(disjoint_mean(trimmed), torch.tensor([4.0, -2.0, 0.0, 0.0]))


def test_a_single_member_is_scaled_and_not_trimmed():
    base, members = family(count=1)
    found, origin, own = flat(merged("ties", members, base, scale=0.5)), flat(base), flat(members[0])
    for name, start in origin.items():
        torch.testing.assert_close(found[name], (start + own[name]) / 2, rtol=1e-5, atol=1e-6)
