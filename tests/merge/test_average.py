"""The mean of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.merge import average


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "normed"])
def test_equal_members_average_to_themselves_bit_by_bit(networks, data, count, kind):
    """The sum of two or four equal numbers is exact, and so is the division by two or four."""
    network = networks[kind]()
    averaged = average(DeepEnsemble([network] * count), data, repair="none")
    for name, tensor in network.state_dict().items():
        assert torch.equal(averaged.state_dict()[name], tensor)


def test_the_mean_by_hand(data):
    networks = [nn.Linear(4, 3) for _ in range(3)]
    with torch.no_grad():
        for value, network in enumerate(networks):
            network.weight.fill_(value)
            network.bias.fill_(-2 * value)
    averaged = average(DeepEnsemble(networks), data)
    assert torch.equal(averaged.weight, torch.ones(3, 4))
    assert torch.equal(averaged.bias, torch.full((3,), -2.0))


def test_the_order_of_two_members_does_not_matter(members, data):
    one, other = members.member(0), members.member(1)
    there, back = (average(DeepEnsemble(pair), data).state_dict() for pair in ([one, other], [other, one]))
    assert all(torch.equal(there[name], back[name]) for name in there)


def test_linear_networks_average_their_predictions(data):
    """Where a network is linear, the mean of the weights is the mean of the logits."""
    members = DeepEnsemble([nn.Linear(4, 3).double() for _ in range(5)])
    inputs = data.test.inputs.double()
    torch.testing.assert_close(average(members, data)(inputs), members(inputs).mean(0))


@pytest.mark.parametrize("reestimated", [True, False])
def test_batch_norm(networks, data, reestimated):
    members = DeepEnsemble([networks["normed"]() for _ in range(2)])
    with torch.no_grad():
        members.expand()["norm.running_mean"].copy_(torch.tensor([1.0, 3.0])[:, None].expand(2, 6))
        members.expand()["norm.num_batches_tracked"].copy_(torch.tensor([5, 9]))
    network = average(members, data, repair="reset" if reestimated else "none")
    assert int(network.version) == 7  # integer buffers have no mean
    if not reestimated:
        assert torch.equal(network.norm.running_mean, torch.full((6,), 2.0))
        assert int(network.norm.num_batches_tracked) == 5
        return
    hidden = network.inner(data.train.inputs).detach()
    torch.testing.assert_close(network.norm.running_mean, hidden.mean(0))
    torch.testing.assert_close(network.norm.running_var, hidden.var(0))


def test_statistics_are_measured_on_training_data_only(networks, data):
    members = DeepEnsemble([networks["normed"]() for _ in range(2)])
    with_others, without = (average(members, part) for part in (data, data.replace(val=[], test=[])))
    assert torch.equal(with_others.norm.running_var, without.norm.running_var)
    half = average(members, data.replace(train=data.train[:20]))
    assert not torch.equal(half.norm.running_var, without.norm.running_var)


def test_the_average_of_independent_members_fails(data):
    """The reference failure: the hidden units of two networks are in different orders."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    turned = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():  # the same function with every hidden unit negated
        turned[0].weight.copy_(-network[0].weight)
        turned[0].bias.copy_(-network[0].bias)
        turned[2].weight.copy_(-network[2].weight)
        turned[2].bias.copy_(network[2].bias)
    inputs = data.test.inputs
    torch.testing.assert_close(turned(inputs), network(inputs))
    averaged = average(DeepEnsemble([network, turned]), data)
    torch.testing.assert_close(averaged(inputs), network[2].bias.expand(30, 3))  # nothing but the bias is left
