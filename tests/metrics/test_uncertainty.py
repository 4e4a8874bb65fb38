import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from scipy.stats import entropy

from enfold.metrics import decomposition
from enfold.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=40)


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
