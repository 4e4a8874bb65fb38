import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from enfold.errors import EnfoldError
from enfold.metrics import (
    agreement,
    bregman_variance,
    cka,
    cosine_similarity,
    disagreement,
    disagreement_matrix,
    double_fault,
    error_correlation,
    jensen_gap,
    linear_cka,
    masegosa_variance,
    normalised_disagreement,
    pairwise_kl,
    q_statistic,
)
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)
several = st.from_type(Predictions).filter(lambda p: p.num_members > 1)
PAIRWISE = (
    agreement,
    cosine_similarity,
    disagreement,
    disagreement_matrix,
    double_fault,
    error_correlation,
    normalised_disagreement,
    pairwise_kl,
    q_statistic,
)


def of_classes(predicted, labels, C=3):
    """Certain members that name these classes: predicted (M, N)."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(predicted), C).double()
    return Predictions(one_hot.log(), torch.tensor(labels))


def of_probs(probs, labels):
    return Predictions(torch.tensor(probs, dtype=torch.float64).log(), torch.tensor(labels))


def random_predictions(M=4, N=300, C=5, seed=0):
    """Members that see the label through noise of their own."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (N,), generator=rng)
    logits = torch.randn(M, N, C, generator=rng, dtype=torch.float64)
    return Predictions.from_logits(logits + 1.5 * torch.nn.functional.one_hot(labels, C), labels)


def ordered_pairs(M):
    return [(i, j) for i in range(M) for j in range(M) if i != j]


def test_disagreement_of_two_by_hand():
    p = of_classes([[0, 1, 2, 0], [0, 1, 1, 1]], [0, 0, 2, 1])
    assert disagreement(p) == 0.5
    assert agreement(p) == 0.5
    expected = torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(disagreement_matrix(p), expected)
    assert double_fault(p) == 0.25  # errors: member 0 in examples 1 and 3, member 1 in examples 1 and 2


def test_normalised_disagreement_by_hand():
    p = of_classes([[0, 1, 2, 0], [0, 0, 1, 0]], [0, 0, 2, 1])  # errors 2/4 and 2/4, ...
    q = of_classes([[0, 0, 2, 0], [0, 1, 1, 0]], [0, 0, 2, 1])  # ... and here 1/4 and 3/4
    assert disagreement(p) == disagreement(q) == 0.5
    assert normalised_disagreement(p) == pytest.approx(1.0)
    assert normalised_disagreement(q, "member") == pytest.approx((0.5 / 0.25 + 0.5 / 0.75) / 2)
    assert normalised_disagreement(q, "sample") == pytest.approx(0.5 / 0.75)
    assert normalised_disagreement(q, "ensemble") == pytest.approx(0.5 / 0.5)  # p̄ ties: 0, 0, 1, 0


def test_sample_compares_with_the_first_member_only():
    p = of_classes([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]], [0, 0, 0, 0])
    assert normalised_disagreement(p, "sample") == pytest.approx((0.25 / 0.25 + 0.5 / 0.5) / 2)


def test_normalisers_agree_with_a_loop():
    p = random_predictions()
    matrix = disagreement_matrix(p).numpy()
    error = (p.log_probs.argmax(-1) != p.labels).double().mean(1).numpy()
    ensemble = (p.mean().log_probs[0].argmax(-1) != p.labels).double().mean().item()
    pairs = ordered_pairs(4)
    expected = {
        "member": np.mean([matrix[i, j] / error[j] for i, j in pairs]),
        "sample": np.mean([matrix[0, j] / error[j] for j in (1, 2, 3)]),
        "ensemble": np.mean([matrix[i, j] for i, j in pairs]) / ensemble,
    }
    for normaliser, value in expected.items():
        assert normalised_disagreement(p, normaliser) == pytest.approx(value, rel=1e-12)


def test_normalising_without_errors():
    right = of_classes([[0, 1], [0, 1]], [0, 1])
    assert [normalised_disagreement(right, n) for n in ("sample", "member", "ensemble")] == [0.0, 0.0, 0.0]
    half = of_classes([[0, 1], [0, 2]], [0, 1])
    assert normalised_disagreement(half, "member") == math.inf
    with pytest.raises(EnfoldError, match=r"normaliser .*'error'"):
        normalised_disagreement(right, "error")


def test_q_statistic_and_correlation_by_hand():
    # right: 1 1 1 0 0 0 and 1 1 0 1 0 0; both right 2, both wrong 2, one only 1 and 1
    p = of_classes([[0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 2]], [0] * 6)
    assert q_statistic(p) == pytest.approx((2 * 2 - 1) / (2 * 2 + 1))
    assert error_correlation(p) == pytest.approx((2 * 2 - 1) / 9)
    assert double_fault(p) == pytest.approx(2 / 6)


def test_undefined_pairs_are_omitted():
    p = of_classes([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], [0, 0, 0, 0])
    assert error_correlation(p) == pytest.approx(0.0)
    assert q_statistic(p) == pytest.approx(0.0)
    perfect = of_classes([[0, 1], [0, 1]], [0, 1])
    assert math.isnan(error_correlation(perfect))
    assert math.isnan(q_statistic(perfect))


def test_error_correlation_agrees_with_numpy():
    p = random_predictions()
    wrong = (p.log_probs.argmax(-1) != p.labels).numpy()
    matrix = np.corrcoef(wrong)
    assert error_correlation(p) == pytest.approx(matrix[np.triu_indices(4, 1)].mean(), rel=1e-10)


def test_pairwise_kl_and_cosine_agree_with_a_loop():
    p = random_predictions()
    probs = p.log_probs.exp().numpy()
    kl = np.mean([rel_entr(probs[i], probs[j]).sum(-1).mean() for i, j in ordered_pairs(4)])
    assert pairwise_kl(p) == pytest.approx(kl, rel=1e-10)
    unit = probs / np.linalg.norm(probs, axis=-1, keepdims=True)
    cosine = np.mean([(unit[i] * unit[j]).sum(-1).mean() for i, j in ordered_pairs(4)])
    assert cosine_similarity(p) == pytest.approx(cosine, rel=1e-12)


def test_bregman_variance_is_the_mean_divergence_from_the_centre():
    p = random_predictions()
    probs = p.log_probs.exp().numpy()
    centre = np.exp(np.log(probs).mean(0))
    centre /= centre.sum(-1, keepdims=True)
    assert bregman_variance(p) == pytest.approx(rel_entr(centre, probs).sum(-1).mean(), rel=1e-10)


def test_masegosa_variance_by_hand():
    p = of_probs([[[0.8, 0.2], [0.5, 0.5]], [[0.4, 0.6], [0.5, 0.5]]], [0, 1])
    assert masegosa_variance(p) == pytest.approx((0.2**2 / (2 * 0.8**2) + 0) / 2)


def test_masegosa_variance_where_the_label_is_impossible():
    p = of_probs([[[1.0, 0.0]], [[1.0, 0.0]]], [1])
    assert masegosa_variance(p) == 0.0
    one = of_probs([[[1.0, 0.0]], [[0.5, 0.5]]], [1])
    assert masegosa_variance(one) == pytest.approx(1 / 8)


def test_disjoint_supports_are_infinitely_far_apart():
    p = of_classes([[0], [1]], [0])
    assert pairwise_kl(p) == math.inf
    assert bregman_variance(p) == math.inf
    assert cosine_similarity(p) == 0.0


@prop
@given(p=st.from_type(Predictions))
def test_identical_members_are_not_diverse(p):
    p = Predictions(p.log_probs[:1].expand(3, -1, -1), p.labels)
    assert disagreement(p) == 0.0
    assert normalised_disagreement(p) == 0.0
    for measure in (pairwise_kl, bregman_variance, masegosa_variance):
        assert measure(p) == pytest.approx(0.0, abs=1e-13)
    assert agreement(p) == 1.0
    assert cosine_similarity(p) == pytest.approx(1.0)
    for measure in (q_statistic, error_correlation):
        assert math.isnan(measure(p)) or measure(p) == pytest.approx(1.0)


@prop
@given(p=several)
def test_disagreement_is_a_metric_on_predictions(p):
    matrix = disagreement_matrix(p)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=0)
    assert (matrix.diagonal() == 0).all()
    assert (matrix[:, None] + matrix[None] >= matrix[..., None] - 1e-12).all()  # d(i, k) + d(j, k) >= d(i, j)


@prop
@given(p=several, seed=st.integers(0, 100))
def test_order_of_members_does_not_matter(p, seed):
    order = torch.randperm(p.num_members, generator=torch.Generator().manual_seed(seed))
    q = p.subset(order.tolist())
    for measure in (*PAIRWISE, bregman_variance, masegosa_variance):
        if measure is not disagreement_matrix:
            assert measure(q) == pytest.approx(measure(p), rel=1e-9, abs=1e-12, nan_ok=True)


@prop
@given(p=several)
def test_masegosa_variance_bounds_the_jensen_gap_from_below(p):
    assert masegosa_variance(p) <= jensen_gap(p).mean().item() + 1e-12


@pytest.mark.parametrize("measure", PAIRWISE)
def test_a_single_network_is_refused(measure):
    with pytest.raises(EnfoldError, match="at least 2"):
        measure(random_predictions(M=1))


@pytest.mark.parametrize("measure", [bregman_variance, masegosa_variance])
def test_a_single_network_has_no_variance(measure):
    assert measure(random_predictions(M=1)) == pytest.approx(0.0, abs=1e-15)


def test_cka_agrees_with_centred_kernels():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 4, generator=draw).double(), torch.randn(20, 6, generator=draw).double()
    centre = torch.eye(20).double() - 1 / 20
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    assert linear_cka(a, b) == pytest.approx(((k * m).sum() / (k.norm() * m.norm())).item())
    turned = 3 * a @ torch.linalg.qr(torch.randn(4, 4, generator=draw).double())[0] + 1
    assert linear_cka(a, turned) == pytest.approx(1)
    assert linear_cka(a, b) == pytest.approx(linear_cka(b, a))
    with pytest.raises(EnfoldError, match="a and b"):
        linear_cka(a, b[:5])


def test_cka_is_invariant_to_normalisers():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 30, 5, generator=draw).double()
    p = Predictions.from_logits(logits, torch.zeros(30, dtype=torch.long))
    centred = logits - logits.mean(-1, keepdim=True)
    by_hand = [linear_cka(centred[i], centred[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert cka(p) == pytest.approx(sum(by_hand) / 3)
    with pytest.raises(EnfoldError, match=r"cka .*at least 2"):
        cka(p.member(0))
    assert cka(Predictions(p.log_probs[:1].expand(3, -1, -1), p.labels)) == pytest.approx(1)
    impossible = p.log_probs.clone()
    impossible[0, 0, 0] = -math.inf
    with pytest.raises(EnfoldError, match="log_probs"):
        cka(Predictions(impossible.log_softmax(-1), p.labels))
