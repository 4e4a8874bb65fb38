"""Weight matching: permuted copies average to the original, functions are preserved, distances decrease."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, average, weight_matching
from planted import assert_back, planted


def spread(members: DeepEnsemble) -> float:
    """The sum of squared distances of the members to member 0."""
    state = {name: tensor for name, tensor in members.expand().items() if name in members.skeleton.parameters}
    return sum(float((tensor[1:] - tensor[:1]).detach().square().sum()) for tensor in state.values())


@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional", "normed", "residual", "sharing", "experts"])
def test_permuted_copies_average_to_the_original(name):
    members, network, data = planted(name, 3)
    assert_back(weight_matching(members, data, repair="none"), network, data)
    with pytest.raises(AssertionError):
        assert_back(average(members, data, repair="none"), network, data)


@pytest.mark.parametrize("seed", range(5))
def test_one_hidden_layer_is_always_recovered(seed):
    members, network, data = planted("shallow", 2, seed)
    folded = weight_matching(members, data)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(folded.state_dict()[name], tensor)


def test_matching_preserves_functions_and_reduces_distances(members, data):
    matched = align(members, data)
    inputs = data.test.inputs
    torch.testing.assert_close(matched.eval()(inputs), members.eval()(inputs), rtol=1e-4, atol=1e-5)
    assert spread(matched) < spread(members)


def test_the_average_of_matched_members(members, data):
    expected = average(align(members, data), data).state_dict()
    assert all(
        torch.equal(expected[name], tensor) for name, tensor in weight_matching(members, data).state_dict().items()
    )


def test_the_reference_keeps_its_order(members, data):
    matched = align(members, data, reference=2)
    for name, tensor in members.member(2).state_dict().items():
        assert torch.equal(matched.member(2).state_dict()[name], tensor)
    with pytest.raises(EnfoldError, match="reference"):
        weight_matching(members, data, reference=4)


def test_batch_norm_is_measured_again_by_default(networks, data):
    members = DeepEnsemble([networks["normed"]() for _ in range(2)])
    again, kept = (weight_matching(members, data, repair=kind) for kind in ("reset", "none"))
    hidden = again.inner(data.train.inputs).detach()
    torch.testing.assert_close(again.norm.running_mean, hidden.mean(0))
    assert torch.equal(kept.norm.running_mean, torch.zeros(6))


def test_networks_without_hidden_units_are_averaged(data):
    members = DeepEnsemble([nn.Linear(4, 3) for _ in range(3)])
    torch.testing.assert_close(weight_matching(members, data).weight, members.expand()["weight"].mean(0).detach())


def test_networks_with_data_dependent_control_flow_are_refused(data):
    class Deciding(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    with pytest.raises(EnfoldError, match="Deciding"):
        weight_matching(DeepEnsemble([Deciding(4, 3), Deciding(4, 3)]), data)


def test_one_member_is_returned_unchanged(members, data):
    folded = weight_matching(members[:1], data).state_dict()
    assert all(torch.equal(folded[name], tensor) for name, tensor in members.member(0).state_dict().items())


def test_unknown_repairs_are_refused():
    with pytest.raises(EnfoldError, match="repair"):
        weight_matching(None, None, repair="glue")
