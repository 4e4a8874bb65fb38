"""A network read as a Dirichlet distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet as Reference

from enfold.distill.dirichlet import Dirichlet, DirichletEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics.dirichlet import dirichlet_uncertainty


class Named(nn.Module):
    """Returns a dictionary, as networks of some libraries do."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": inputs}


@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0])
def test_its_logits_are_those_of_the_mean(offset):
    network = nn.Linear(4, 3).eval()
    inputs = 5 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    predictor = Dirichlet(network, offset)
    alphas = predictor.concentrations(inputs)
    torch.testing.assert_close(alphas, network(inputs).double().exp() + offset)
    torch.testing.assert_close(predictor(inputs).softmax(-1), Reference(alphas).mean.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(predictor(inputs).argmax(-1), network(inputs).argmax(-1))
    assert not predictor.training
    found = predictor.uncertainties(inputs)
    expected = vars(dirichlet_uncertainty(alphas.detach()))
    assert list(found) == ["total", "aleatoric", "epistemic", "epkl", "mkl", "precision"]
    for name, values in found.items():
        assert values.shape == (6,)
        assert not values.requires_grad
        torch.testing.assert_close(values, expected[name])


def test_large_logits_do_not_overflow():
    predictor = Dirichlet(Named(), 1.0)
    inputs = torch.tensor([[200.0, 0.0, -200.0]])
    torch.testing.assert_close(predictor(inputs), torch.tensor([[200.0, math.log(2), 0.0]]))
    assert all(bool(torch.isfinite(values).all()) for values in predictor.uncertainties(inputs).values())


def test_an_ensemble_is_read_member_by_member():
    members = DeepEnsemble([nn.Linear(4, 3) for _ in range(2)])
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    predictor = DirichletEnsemble(members, 1.0)
    assert predictor.num_members == 2
    assert isinstance(predictor.member(0), Dirichlet)
    with pytest.raises(EnfoldError, match="DirichletEnsemble"):
        Dirichlet(members, 1.0)
    together = member_logits(predictor, inputs)
    assert together.shape == (2, 5, 3)
    for index, member in enumerate(members):
        torch.testing.assert_close(together[index], Dirichlet(member, 1.0)(inputs))
        epistemic = Dirichlet(member, 1.0).uncertainties(inputs)["epistemic"]
        torch.testing.assert_close(predictor.uncertainties(inputs)["epistemic"][index], epistemic)


@pytest.mark.parametrize("offset", [-1.0, math.nan, math.inf])
def test_an_offset_below_0(offset):
    with pytest.raises(EnfoldError, match=f"offset .* got {offset}"):
        Dirichlet(nn.Linear(4, 3), offset)
