"""ZipIt!: pairs by hand, budgets, planted copies, and units that no other member has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import zipit
from enfold.merge.zipit import _Pairs, zip_units
from planted import NETWORKS, assert_back, planted


def likeness(pairs: dict[tuple[int, int], float], total: int) -> torch.Tensor:
    found = torch.eye(total, dtype=torch.float64)
    for (one, other), value in pairs.items():
        found[one, other] = found[other, one] = value
    return found


def together(unmerge: torch.Tensor) -> list[list[int]]:
    return sorted(torch.nonzero(column).flatten().tolist() for column in unmerge.T)


@pytest.mark.parametrize(("name", "count"), [("shallow", 2), ("shallow", 4), ("deep", 3), ("residual", 3)])
def test_permuted_copies_average_to_the_original(name, count):
    members, network, data = planted(name, count)
    assert_back(zipit(members, data, repair="none"), network, data)


def test_across_members_by_hand():
    """Two members of two units, with each other's in the other order."""
    found = zip_units(likeness({(0, 3): 0.9, (1, 2): 0.8, (0, 2): 0.1, (1, 3): 0.2}, 4), 2)
    assert together(found) == [[0, 3], [1, 2]]


def test_within_a_member_if_the_budget_allows_it():
    """Units 0 and 1 of the first member are the same, and those of the second are like nothing else."""
    likes = likeness({(0, 1): 0.99, (0, 2): 0.1, (1, 3): 0.1, (2, 3): 0.05}, 4)
    assert together(zip_units(likes, 2, budget=1.0)) == [[0, 1], [2, 3]]
    assert together(zip_units(likes, 2, budget=0.0)) == [[0, 2], [1, 3]]


def test_a_merged_unit_has_a_discounted_likeness():
    """0 and 3 are merged first; without the discount, 1 would join them before 2 and 5 come together."""
    likes = likeness({(0, 3): 0.9, (1, 3): 0.8, (0, 1): 0.8, (2, 5): 0.4, (1, 4): 0.3}, 6)
    assert together(zip_units(likes, 2, discount=0.3, budget=1.0)) == [[0, 3], [1, 4], [2, 5]]
    assert [0, 1, 3] in together(zip_units(likes, 2, discount=1.0, budget=1.0))


def test_one_unit_of_each_of_three_members_is_merged():
    pairs = {(0, 2): 0.9, (0, 4): 0.5, (2, 4): 0.5, (1, 3): 0.9, (1, 5): 0.5, (3, 5): 0.5, (4, 5): 0.4}
    assert together(zip_units(likeness(pairs, 6), 3, budget=1.0)) == [[0, 2, 4], [1, 3, 5]]


def test_a_merged_unit_has_the_smaller_likeness():
    """0 and 3 are merged first; 4 is similar to 0 only, so that 1 is more similar."""
    likes = likeness({(0, 3): 0.9, (0, 4): 0.8, (3, 4): 0.1, (1, 4): 0.5, (2, 5): 0.4}, 6)
    assert together(zip_units(likes, 2, discount=1.0, budget=1.0)) == [[0, 3], [1, 4], [2, 5]]


def test_a_budget_is_a_fraction_of_the_lost_units():
    """Each of two members loses 2 of its 4 units; the budget of one half is 1, so that 2 and 3 remain separate."""
    likes = likeness({(0, 1): 0.9, (2, 3): 0.8, (2, 6): 0.5, (3, 7): 0.5, (4, 5): 0.4}, 8)
    assert together(zip_units(likes, 2, budget=0.5)) == [[0, 1], [2, 6], [3, 7], [4, 5]]
    assert [2, 3] in together(zip_units(likes, 2, budget=1.0))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("budget", [0.0, 0.125, 1.0])
def test_every_unit_is_merged_into_one_unit(count, budget):
    units = torch.randn(count * 7, 40, generator=torch.Generator().manual_seed(count))
    unmerge = zip_units(torch.corrcoef(units).double(), count, budget=budget)
    assert unmerge.shape == (count * 7, 7)
    assert torch.equal(unmerge.sum(1), torch.ones(count * 7).double())
    assert (unmerge.sum(0) >= 1).all()
    merge = (unmerge / unmerge.sum(0)).T
    torch.testing.assert_close(merge @ unmerge, torch.eye(7).double())


def test_duplicate_linear_units_are_merged(data):
    """Each member has one unit twice and one that the other lacks: three units hold all, no one-to-one match does."""
    base = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    base[2] = -base[1]
    one, other = (nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)) for _ in range(2))
    with torch.no_grad():
        one[0].weight.copy_(base[[0, 0, 1]])
        other[0].weight.copy_(base[[0, 0, 2]])
    folded = zipit(DeepEnsemble([one, other]), data.replace(num_classes=3), discount=1.0, budget=1.0, watch="outputs")
    inputs = data.test.inputs
    torch.testing.assert_close(folded(inputs), (one(inputs) + other(inputs)) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"discount": 1.5}, {"budget": -0.1}])
def test_invalid_options(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        zipit(None, None, **settings)


class PartlyHidden(nn.Module):
    """The first outputs of a layer are classes, the others are hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 9), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        classes, hidden = self.inner(inputs).split([3, 6], dim=1)
        return classes + self.head(torch.relu(hidden))


def test_unmerged_entries_of_a_tensor_are_averaged(monkeypatch):
    monkeypatch.setitem(NETWORKS, "partly hidden", (PartlyHidden, (4,)))
    members, network, data = planted("partly hidden", 3)
    assert_back(zipit(members, data), network, data)


def test_unrelated_units_are_merged_once_if_possible():
    pairs = {(0, 2): 0.9, (1, 3): -0.1, (0, 1): 0.1, (0, 3): 0.1, (1, 2): 0.1, (2, 3): 0.1}
    assert together(zip_units(likeness(pairs, 4), 2, discount=0.0, budget=1.0)) == [[0, 2], [1, 3]]


def zipped_by_definition(likes: torch.Tensor, num_members: int, discount: float, budget: float) -> list[list[int]]:
    """All pairs are searched before every merge."""
    total, size = len(likes), len(likes) // num_members
    likes, units = likes.clone(), {index: [index] for index in range(total)}
    left = [int((total - size) / num_members * budget + 1e-4)] * num_members
    closed = set()
    for one in range(total):
        for other in range(total):
            likes[one, other] += 1e-9 * (one % size == other % size and one // size != other // size)
    while len(units) > size:
        pairs = [(one, other) for one in units for other in units if one < other]
        spent = {k for k in range(num_members) if left[k] <= 0}
        closed |= {(i, j) for i, j in pairs if i // size == j // size and i // size in spent}
        row, column = max([pair for pair in pairs if pair not in closed] or pairs, key=lambda pair: float(likes[pair]))
        closed |= {tuple(sorted((row, k))) for k in units if tuple(sorted((column, k))) in closed}
        units[row] += units.pop(column)
        merged = torch.minimum(likes[row], likes[column])
        if len(units[row]) >= num_members:
            merged = merged * discount if discount else torch.full_like(merged, -1e3)
        likes[row] = likes[:, row] = merged
        left[row // size] -= row // size == column // size
    return sorted(sorted(some) for some in units.values())


@pytest.mark.parametrize("budget", [0.0, 0.125, 1.0])
@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("values", ["any", "ties", "below 0"])
def test_pairs_are_those_of_the_definition(values, discount, budget):
    for seed, count in enumerate((2, 3, 4)):
        units = torch.randn(count * 6, 5, generator=torch.Generator().manual_seed(seed)).double()
        likes = torch.corrcoef(units)
        likes = (2 * likes).round() / 2 if values == "ties" else likes - 1.5 * (values == "below 0")
        likes = (likes + likes.T) / 2
        expected = zipped_by_definition(likes, count, discount, budget)
        assert together(zip_units(likes, count, discount, budget)) == expected


@pytest.mark.parametrize("still", [0, 60])
def test_merging_a_pair_updates_few_units(still, monkeypatch):
    """Also where many units are equally like all others, as those that never fire are."""
    searched, search = [], _Pairs._search
    monkeypatch.setattr(_Pairs, "_search", lambda self, row: searched.append(row) or search(self, row))
    likes = torch.corrcoef(torch.randn(300, 40, generator=torch.Generator().manual_seed(0))).double()
    likes[:still, :still] = 1
    zip_units(likes, 3)
    assert len(searched) < 300 + 15 * 200
