import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from scipy.stats import entropy

from enfold.errors import EnfoldError
from enfold.metrics import decomposition, of_concentrations, uncertainty_correlation
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)


def of_probs(probs):
    probs = torch.tensor(probs, dtype=torch.float64)
    return Predictions(probs.log(), torch.zeros(probs.shape[1], dtype=torch.long))


def exact_probs(p):
    return p.log_probs.double().log_softmax(-1).exp().numpy()


@prop
@given(p=st.from_type(Predictions))
def test_agrees_with_scipy(p):
    probs = exact_probs(p)
    mean = probs.mean(0)
    u = decomposition(p)
    assert u.total.numpy() == pytest.approx(entropy(mean, axis=-1), abs=1e-12)
    assert u.aleatoric.numpy() == pytest.approx(entropy(probs, axis=-1).mean(0), abs=1e-12)
    assert u.epistemic.numpy() == pytest.approx(rel_entr(probs, mean).sum(-1).mean(0), abs=1e-12)
    assert u.rmi.numpy() == pytest.approx(rel_entr(mean, probs).sum(-1).mean(0), abs=1e-11)
    pairs = rel_entr(probs[:, None], probs[None]).sum(-1).mean((0, 1))
    assert u.epkl.numpy() == pytest.approx(pairs, abs=1e-11)


@prop
@given(p=st.from_type(Predictions))
def test_identities_and_bounds(p):
    u = decomposition(p)
    torch.testing.assert_close(u.aleatoric + u.epistemic, u.total, rtol=0, atol=1e-12)
    torch.testing.assert_close(u.epistemic + u.rmi, u.epkl, rtol=1e-12, atol=1e-12)
    assert (u.epistemic <= min(math.log(p.num_members), math.log(p.num_classes)) + 1e-12).all()
    assert (u.total <= math.log(p.num_classes) + 1e-12).all()
    for values in (u.total, u.aleatoric, u.epistemic, u.rmi, u.epkl):
        assert values.shape == (len(p),)
        assert (values >= 0).all()


@prop
@given(p=st.from_type(Predictions), M=st.integers(1, 4))
def test_identical_members_have_no_epistemic_uncertainty(p, M):
    u = decomposition(Predictions(p.log_probs[:1].expand(M, -1, -1), p.labels))
    for values in (u.epistemic, u.rmi, u.epkl):
        assert (values >= 0).all()
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-13)


def test_two_certain_members_that_disagree():
    u = decomposition(of_probs([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]]))
    assert u.aleatoric.item() == 0.0
    assert u.epistemic.item() == pytest.approx(math.log(2))
    assert u.total.item() == pytest.approx(math.log(2))
    assert u.rmi.item() == math.inf
    assert u.epkl.item() == math.inf


def test_one_network_by_hand():
    u = decomposition(of_probs([[[0.5, 0.25, 0.25]]]))
    assert u.total.item() == pytest.approx(1.5 * math.log(2))
    assert u.aleatoric.item() == u.total.item()
    assert u.epistemic.item() == 0.0


def test_two_members_by_hand():
    u = decomposition(of_probs([[[0.5, 0.5]], [[0.9, 0.1]]]))
    a, b = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    kl = (a * np.log(a / b)).sum() + (b * np.log(b / a)).sum()
    assert u.epkl.item() == pytest.approx(kl / 4)


def test_correlation_with_the_members_uncertainty():
    draw = torch.Generator().manual_seed(0)
    labels = torch.zeros(300, dtype=torch.long)
    easy = 3 * torch.rand(300, 1, generator=draw) * torch.randn(300, 4, generator=draw)
    ensemble = Predictions.from_logits((easy + 0.5 * torch.randn(5, 300, 4, generator=draw)).double(), labels)
    itself = uncertainty_correlation(ensemble, ensemble)
    for same in (itself.entropy, itself.epistemic):
        assert (same.pearson, same.spearman) == pytest.approx((1.0, 1.0))
    mean = uncertainty_correlation(ensemble.mean(), ensemble)
    assert mean.entropy.spearman == pytest.approx(1.0)
    assert mean.mutual_information.pearson == pytest.approx(itself.mutual_information.pearson)
    assert math.isnan(mean.epistemic.pearson)  # one network has no epistemic part of its own
    student = Predictions.from_logits(easy, labels)
    noise = Predictions.from_logits(torch.randn(300, 4, generator=draw), labels)
    assert (
        uncertainty_correlation(student, ensemble).entropy.pearson
        > 0.7
        > abs(uncertainty_correlation(noise, ensemble).entropy.pearson) + 0.5
    )
    with pytest.raises(EnfoldError, match="labels"):
        uncertainty_correlation(Predictions(student.log_probs, labels + 1), ensemble)
    with pytest.raises(EnfoldError, match="at least 2"):
        uncertainty_correlation(student, student)


def test_a_dirichlet_student_agrees_with_an_ensemble_drawn_from_it():
    draw = torch.Generator().manual_seed(0)
    alphas = torch.rand(40, 3, generator=draw, dtype=torch.float64) * 5 + 0.5
    torch.manual_seed(0)
    drawn = torch.distributions.Dirichlet(alphas).sample((3000,))
    ensemble = Predictions(drawn.log(), torch.zeros(40, dtype=torch.long))
    own, theirs = of_concentrations(alphas), decomposition(ensemble)
    for name in ("total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(own, name), getattr(theirs, name), rtol=0.1, atol=0.01)
    assert uncertainty_correlation(own, ensemble).epistemic.pearson > 0.95
