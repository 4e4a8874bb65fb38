"""The rank defect of a Hadamard quotient: Theorem 1, taps, zeros, and against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.rank_one import hadamard_rank_defect
from enfold.ensembles.rank_one.quotient import quotient
from enfold.errors import EnfoldError

SIZES = st.integers(2, 7)
SEEDS = st.integers(0, 10**6)
relaxed = settings(max_examples=25, deadline=None)  # a busy machine is no failure


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def away_from_zero(seed, *shape):
    """Normal, but with no entry between -0.1 and 0.1."""
    drawn = normal(seed, *shape)
    return drawn + 0.1 * torch.where(drawn < 0, -1.0, 1.0)


def scaled(weight, seed):
    """weight ∘ (s r^T), with r and s common to all taps."""
    s, r = away_from_zero(seed, weight.shape[0]), away_from_zero(seed + 1, weight.shape[1])
    return weight * torch.outer(s, r).view(*weight.shape[:2], *(1,) * (weight.ndim - 2))


@relaxed
@given(seed=SEEDS, rows=SIZES, columns=SIZES)
def test_it_is_the_second_singular_value_over_the_first(seed, rows, columns):
    a, b = away_from_zero(seed, rows, columns), away_from_zero(seed + 1, rows, columns)
    values = np.linalg.svd((a / b).numpy(), compute_uv=False)
    assert hadamard_rank_defect(a, b) == pytest.approx(values[1] / values[0], abs=1e-12)


def test_a_quotient_by_hand():
    b = torch.ones(2, 2)
    assert hadamard_rank_defect(torch.tensor([[3.0, 0.0], [0.0, 1.5]]), b) == pytest.approx(0.5)
    assert hadamard_rank_defect(torch.tensor([[2.0, 4.0], [3.0, 6.0]]), b) < 1e-12
    assert hadamard_rank_defect(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), b) == pytest.approx(1)


@relaxed
@given(seed=SEEDS, rows=SIZES, columns=SIZES, taps=st.sampled_from([(), (3,), (2, 2)]), balanced=st.booleans())
def test_weights_scaled_by_rank_one_have_no_defect(seed, rows, columns, taps, balanced):
    weight = normal(seed, rows, columns, *taps)
    a, b = scaled(weight, seed + 1), scaled(weight, seed + 5)
    assert hadamard_rank_defect(a, b, balanced=balanced) < 1e-6
    assert hadamard_rank_defect(a.float(), b.float(), balanced=balanced) < 1e-6


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", [(8, 8), (40, 30), (6, 5, 3, 3)])
def test_random_weights_have_a_large_defect(seed, shape):
    a, b = normal(seed, *shape), normal(seed + 100, *shape)
    assert max(hadamard_rank_defect(a, b), hadamard_rank_defect(b, a)) > 0.01
    assert max(hadamard_rank_defect(a, b, balanced=True), hadamard_rank_defect(b, a, balanced=True)) > 0.01


def test_kernel_positions_have_common_factors():
    weight = away_from_zero(0, 4, 3, 5)
    by_tap = weight * torch.linspace(1, 2, 5)  # of rank one for each tap, and as a matrix (out, in * taps)
    assert hadamard_rank_defect(by_tap, weight) > 0.1
    one = weight.clone()
    one[2, 1, 3] *= 1.001
    assert 1e-5 < hadamard_rank_defect(one, weight) < 1e-2
    opposite = weight * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])  # the mean over taps is zero, which has no rank
    assert hadamard_rank_defect(opposite, weight) == 1


@relaxed
@given(seed=SEEDS)
def test_equal_taps_count_as_one(seed):
    a, b = away_from_zero(seed, 4, 3), away_from_zero(seed + 1, 4, 3)
    repeated = [weight.unsqueeze(-1).repeat(1, 1, 6) for weight in (a, b)]
    assert hadamard_rank_defect(*repeated) == pytest.approx(hadamard_rank_defect(a, b), abs=1e-9)


@relaxed
@given(seed=SEEDS, rows=st.integers(2, 6), columns=st.integers(2, 6), kept=st.floats(0.0, 1.0), taps=SIZES)
def test_weights_that_are_zero_in_both_are_omitted(seed, rows, columns, kept, taps):
    weight = normal(seed, rows, columns, taps)
    source = torch.Generator().manual_seed(seed)
    weight = weight * (torch.rand(weight.shape, generator=source) < kept)
    a, b = scaled(weight, seed + 1), scaled(weight, seed + 5)
    found = quotient(a.unsqueeze(0), b.unsqueeze(0))
    assert found.values.isfinite().all()
    assert found.contradictions == 0
    assert found.left_out >= int((weight == 0).sum())
    assert hadamard_rank_defect(a, b) < 1e-6
    assert hadamard_rank_defect(a, b, balanced=True) < 1e-6


def test_what_is_left_of_a_weight_with_zeros_still_counts():
    weight = away_from_zero(0, 4, 4)
    weight[0, 0] = weight[1, 2] = 0
    other = scaled(weight, 3)
    other[3, 3] *= 2
    assert hadamard_rank_defect(other, weight) > 0.01
    # The first two rows and columns hang together by nothing: any size between them will do.
    separate = torch.block_diag(away_from_zero(1, 2, 2), away_from_zero(2, 2, 2))
    assert (
        hadamard_rank_defect(scaled(separate, 3) * torch.block_diag(torch.ones(2, 2), 7 * torch.ones(2, 2)), separate)
        < 1e-9
    )


def test_a_weight_near_zero_in_one_network_is_a_contradiction():
    a = away_from_zero(0, 4, 4)
    for small in (0.0, 1e-12, -1e-300):
        b = scaled(a, 3)
        b[1, 2] = small
        assert hadamard_rank_defect(a, b) == 1
        assert hadamard_rank_defect(b, a) > 0.01
        assert quotient(a.view(1, 4, 4, 1), b.view(1, 4, 4, 1)).contradictions == 1


def test_a_unit_that_is_zero_in_one_network_is_representable():
    a = away_from_zero(0, 4, 4)
    b = scaled(a, 3)
    b[1] = 0
    b[:, 2] = 0
    assert hadamard_rank_defect(a, b) < 1e-9
    assert hadamard_rank_defect(b, a) < 1e-9
    assert hadamard_rank_defect(torch.zeros(4, 4), a) < 1e-9


def test_balanced_ignores_dead_units():
    a, b = away_from_zero(0, 6, 6), away_from_zero(1, 6, 6)
    a[0] *= 1e-9
    b[1] *= 1e-9
    assert max(hadamard_rank_defect(a, b), hadamard_rank_defect(b, a)) < 1e-6  # one row dwarfs the others
    assert hadamard_rank_defect(a, b, balanced=True) > 0.1


@relaxed
@given(seed=SEEDS)
def test_balanced_is_invariant_to_scales(seed):
    a, b = away_from_zero(seed, 5, 4, 2), away_from_zero(seed + 1, 5, 4, 2)
    expected = hadamard_rank_defect(a, b, balanced=True)
    assert hadamard_rank_defect(scaled(a, seed + 2), scaled(b, seed + 6), balanced=True) == pytest.approx(expected)


@relaxed
@given(seed=SEEDS, rank=st.integers(1, 3), slow=st.integers(1, 3))
def test_a_hadamard_product_has_at_most_the_product_of_the_ranks(seed, rank, slow):
    layer = torch.nn.Linear(12, 10, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(normal(seed, 10, slow) @ normal(seed + 1, slow, 12))
    members = BatchEnsemble(layer, 2, rank=rank, seed=seed)
    with torch.no_grad():
        for name, tensor in members.fast.state().items():
            members.fast._parameters[name] = torch.nn.Parameter(tensor.double())
    for weight in members.expand()["weight"]:
        values = torch.linalg.svdvals(weight.detach())
        assert (values[rank * slow :] < 1e-10 * values[0]).all()
        assert torch.linalg.matrix_rank(weight.detach() / layer.weight.detach(), rtol=1e-6) <= rank


def test_rank_two_is_not_rank_one():
    weights = BatchEnsemble(torch.nn.Linear(12, 10), 2, rank=2).expand()["weight"]
    assert hadamard_rank_defect(*weights) > 1e-2


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(3), torch.ones(3), r"a must .*got the shape \(3,\)"),
        (torch.ones(3, 2), torch.ones(2, 3), r"got \(3, 2\) and \(2, 3\)"),
        (torch.ones(2, 2), torch.full((2, 2), torch.nan), "b must be finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(a, b, message):
    with pytest.raises(EnfoldError, match=message):
        hadamard_rank_defect(a, b)
