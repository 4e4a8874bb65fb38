"""DARE: what is dropped, its expectation, and that draws belong to members."""

from __future__ import annotations

import pytest
import torch

from enfold.merge.common.fine_tuned import seeds_by_content
from enfold.merge.dare import drop_and_rescale
from enfold.merge.ties import disjoint_mean
from enfold.seeds import generator
from fine_tuned import family, flat, merged


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.9])
def test_entries_are_dropped_or_rescaled(drop):
    vector = torch.linspace(1, 2, 20000)
    found = drop_and_rescale(vector, drop, torch.Generator().manual_seed(0))
    retained = found != 0
    torch.testing.assert_close(found[retained], vector[retained] / (1 - drop))
    assert float(retained.float().mean()) == pytest.approx(1 - drop, abs=0.02)
    assert float(found.mean()) == pytest.approx(float(vector.mean()), rel=0.05)


def vectors(networks: list, base: torch.nn.Module) -> torch.Tensor:
    start = dict(base.named_parameters())
    return torch.stack(
        [torch.cat([(p - start[name]).flatten() for name, p in each.named_parameters()]) for each in networks]
    ).detach()


@pytest.mark.parametrize("combine", ["average", "ties"])
def test_the_formula_with_the_same_draws(combine):
    base, members = family(count=3)
    names = [name for name, _ in base.named_parameters()]
    texts = seeds_by_content([dict(each.named_parameters()) for each in members], names)
    each = torch.stack(
        [
            drop_and_rescale(vector, 0.5, generator(4, "dare", text))
            for vector, text in zip(vectors(members, base), texts, strict=True)
        ]
    )
    expected = each.mean(0) if combine == "average" else disjoint_mean(each)
    found = merged("dare", members, base, drop=0.5, combine=combine, seed=4)
    torch.testing.assert_close(vectors([found], base)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("combine", ["average", "ties"])
def test_nothing_dropped_is_the_mean_or_ties(combine):
    base, members = family(count=3)
    found = flat(merged("dare", members, base, drop=0.0, combine=combine))
    other = {"average": merged("task_arithmetic", members, base), "ties": merged("ties", members, base, density=1.0)}
    for name, tensor in flat(other[combine]).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_equal_members_have_draws_of_their_own_and_seeds_matter():
    base, members = family(count=2)
    texts = seeds_by_content([dict(members[0].named_parameters())] * 2, ["inner.weight"])
    assert len(set(texts)) == 2
    one, same, other = (merged("dare", members, base, seed=seed).inner.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
