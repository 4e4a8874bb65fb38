"""OOD scores by hand and against scikit-learn, at any scale and with ties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from enfold.errors import EnfoldError
from enfold.metrics import aupr, auroc, decomposition, detection, fpr95, of_concentrations, ood_score, ood_scores, roc
from enfold.metrics.ood import SCORES
from enfold.metrics.predictions import Predictions

prop = settings(derandomize=True, max_examples=25)
scores = st.lists(st.integers(-4, 4), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


def judged(inside, outside, positive="outside"):
    labels = np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])
    values = torch.cat([inside, outside]).numpy()
    return (labels, values) if positive == "outside" else (1 - labels, -values)


@prop
@given(inside=scores, outside=scores)
def test_agrees_with_scikit_learn(inside, outside):
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(*judged(inside, outside)), abs=1e-12)
    for positive in ("outside", "inside"):
        labels, values = judged(inside, outside, positive)
        assert aupr(inside, outside, positive) == pytest.approx(average_precision_score(labels, values), abs=1e-12)
        false, true, _ = roc_curve(labels, values, drop_intermediate=False)
        assert fpr95(inside, outside, positive) == pytest.approx(false[true >= 0.95 - 1e-12][0], abs=1e-12)
    false, true, _ = roc_curve(*judged(inside, outside), drop_intermediate=False)
    np.testing.assert_allclose(roc(inside, outside)[0], false, atol=1e-12)
    np.testing.assert_allclose(roc(inside, outside)[1], true, atol=1e-12)


@prop
@given(inside=scores, outside=scores)
def test_a_monotone_map_changes_nothing_and_swapping_mirrors(inside, outside):
    mapped = detection(torch.exp(inside / 2) - 3, torch.exp(outside / 2) - 3)
    assert mapped == pytest.approx(detection(inside, outside))
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1.0)
    assert auroc(-outside, -inside) == pytest.approx(auroc(inside, outside))
    assert aupr(inside, outside, "inside") == pytest.approx(aupr(-outside, -inside, "outside"))


def test_separable_swapped_and_tied():
    low, high = torch.arange(20.0), torch.arange(100.0, 130.0)
    assert detection(low, high) == {"auroc": 1, "aupr": 1, "aupr_inside": 1, "fpr95": 0, "fpr95_inside": 0}
    assert auroc(high, low) == 0
    assert fpr95(high, low) == fpr95(high, low, "inside") == 1
    same = torch.ones(7)
    assert auroc(same, torch.ones(3)) == 0.5
    assert aupr(same, torch.ones(3)) == pytest.approx(0.3)  # the fraction of positives
    assert fpr95(same, torch.ones(3)) == 1


def test_the_positive_side_matters_for_fpr95():
    inside = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 20])
    outside = torch.tensor([7.5, 9, 10, 11])
    assert fpr95(inside, outside) == pytest.approx(0.2)  # all four found at 7.5, where 8 and 20 are taken too
    assert fpr95(inside, outside, "inside") == 1.0  # all ten found at 20 only
    assert fpr95(inside, outside, recall=0.75) == pytest.approx(0.1)


def two_members():
    probs = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]], [[0.2, 0.6, 0.2], [0.7, 0.3, 0.0]]], dtype=torch.float64)
    return Predictions(probs.log(), torch.zeros(2, dtype=torch.long))


def test_scores_by_hand():
    p = two_members()
    logits = torch.tensor([[[1.0, 2.0, 0.0]] * 2, [[0.0, 0.0, 0.0]] * 2])
    found = ood_scores(p, logits)
    assert tuple(found) == SCORES
    torch.testing.assert_close(found["max_probability"], torch.tensor([0.55, 0.2], dtype=torch.float64))
    torch.testing.assert_close(found["variation_ratio"], torch.tensor([0.5, 0.0], dtype=torch.float64))
    u = decomposition(p)
    torch.testing.assert_close(found["mutual_information"], u.epistemic)
    torch.testing.assert_close(found["epkl"], found["mutual_information"] + found["rmi"])
    total = math.e + math.e**2 + 1
    assert found["energy"][0].item() == pytest.approx(-(math.log(total) + math.log(3)) / 2)
    assert found["dempster_shafer"][0].item() == pytest.approx((3 / (3 + total) + 0.5) / 2)


@prop
@given(p=st.from_type(Predictions))
def test_scores_increase_with_uncertainty(p):
    for name, values in ood_scores(p).items():
        assert values.shape == (len(p),)
        assert (values >= 0).all(), name
    uniform = Predictions.from_logits(torch.zeros(p.log_probs.shape), p.labels)
    assert (ood_score("entropy", uniform) >= ood_score("entropy", p) - 1e-12).all()
    assert (ood_score("max_probability", uniform) >= ood_score("max_probability", p) - 1e-12).all()


def test_near_certainty_is_still_ranked():
    p = Predictions.from_logits(torch.tensor([[40.0, 0.0], [50.0, 0.0]], dtype=torch.float64), torch.zeros(2).long())
    sure, surer = ood_score("max_probability", p)
    assert 0 < surer < sure < 1e-15


def test_a_dirichlet_student_has_the_scores_of_members():
    alphas = torch.tensor([[3.0, 1.0, 1.0], [0.2, 0.2, 0.2]])
    p = Predictions.from_logits(alphas.log(), torch.zeros(2).long())
    found, u = ood_scores(p, alphas=alphas), of_concentrations(alphas)
    torch.testing.assert_close(found["mutual_information"], u.epistemic)
    torch.testing.assert_close(found["rmi"], u.epkl - u.epistemic)
    torch.testing.assert_close(u.total, decomposition(p).total, atol=1e-6, rtol=0)
    assert found["mutual_information"][1] > found["mutual_information"][0]
    assert "variation_ratio" not in found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: ood_score("energy", p), "logits"),
        (lambda p: ood_scores(p, p.log_probs.clamp(min=-50)), "logits .*log-probabilities"),
        (lambda p: ood_scores(p, torch.zeros(2, 3)), "logits must have"),
        (lambda p: ood_score("epkl", p.member(0)), "epkl .*at least 2"),
        (lambda p: ood_score("entropie", p), "did you mean 'entropy'"),
        (lambda p: auroc(torch.tensor([]), torch.ones(2)), "inside must"),
        (lambda p: auroc(torch.ones(2), torch.tensor([math.nan])), "outside must"),
        (lambda p: aupr(torch.ones(2), torch.ones(2), "out"), "positive must"),
        (lambda p: fpr95(torch.ones(2), torch.ones(2), recall=95), "recall must .*95"),
    ],
)
def test_what_cannot_be_scored_is_refused(call, message):
    with pytest.raises(EnfoldError, match=message):
        call(two_members())
