"""Activation matching: permuted copies average to the original, and units are matched at any scale."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import activation_matching, align
from planted import assert_back, planted


@pytest.mark.parametrize(
    ("name", "watch"),
    [
        *(("shallow", "outputs"), ("deep", "inputs"), ("convolutional", "outputs"), ("residual", "inputs")),
        *(("sharing", "inputs"), ("sharing", "outputs"), ("experts", "inputs")),
    ],
)
def test_permuted_copies_average_to_the_original(name, watch):
    members, network, data = planted(name, 3)
    assert_back(activation_matching(members, data, repair="none", watch=watch), network, data)


@pytest.mark.parametrize("likeness", ["correlation", "second_moment"])
def test_members_compute_the_same_function(members, data, likeness):
    matched = align(members, data, method="activation_matching", likeness=likeness)
    inputs = data.test.inputs
    torch.testing.assert_close(matched.eval()(inputs), members.eval()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("likeness", ["correlation", "second_moment"])
def test_the_assignment_is_that_of_the_units_themselves(data, likeness):
    """Against activations computed by hand on all of the training part."""
    torch.manual_seed(0)
    members = DeepEnsemble([nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)])
    one, other = (torch.tanh(member[0](data.train.inputs)).detach().double().T for member in members)
    likes = torch.corrcoef(torch.cat([one, other]))[:6, 6:] if likeness == "correlation" else one @ other.T
    order = linear_sum_assignment(likes.numpy(), maximize=True)[1]
    matched = align(members, data, method="activation_matching", likeness=likeness)
    assert torch.equal(matched.member(1)[0].weight, members.member(1)[0].weight[order])
    assert torch.equal(matched.member(1)[2].weight, members.member(1)[2].weight[:, order])


def test_correlation_is_invariant_to_the_scale_of_a_unit(data):
    """Every unit of a planted copy is scaled by its own factor, and its outgoing weights by the inverse."""
    members, network, _ = planted("shallow", 2)
    copy = members.member(1)
    factors = torch.linspace(0.2, 5, 12)
    with torch.no_grad():
        copy.hidden[0].weight.mul_(factors[:, None])
        copy.hidden[0].bias.mul_(factors)
        copy.head.weight.div_(factors)
    matched = align(DeepEnsemble([network, copy]), data, method="activation_matching").member(1)
    torch.testing.assert_close(
        matched.hidden[0].weight / matched.hidden[0].weight.norm(dim=1, keepdim=True),
        network.hidden[0].weight / network.hidden[0].weight.norm(dim=1, keepdim=True),
    )


def test_inactive_units_remain_in_place(data):
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        network[0].bias[1:4] = -100.0
    folded = activation_matching(DeepEnsemble([network, network]), data)
    torch.testing.assert_close(dict(folded.state_dict()), dict(network.state_dict()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likeness": "distance"}, "likeness must be one of correlation, second_moment, got 'distance'"),
        ({"watch": "weights"}, "watch must be one of inputs, outputs, got 'weights'"),
        ({"examples": 0}, "examples must be 1 or more, got 0: 4096 is usual"),
        ({"reference": -1}, "reference must be 0 or more, got -1: 0 is usual"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        activation_matching(None, None, **settings)
