"""MergeMany: planted copies average back, members come nearer to each other and stay what they are."""

from __future__ import annotations

import pytest
import torch

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, merge_many, weight_matching
from planted import NETWORKS, assert_back, drawn, pixels, planted


def distances(members: DeepEnsemble) -> float:
    """The sum of squared distances of all members to their mean."""
    state = {name: tensor for name, tensor in members.expand().items() if name in members.skeleton.parameters}
    return sum(float((tensor - tensor.mean(0)).detach().square().sum()) for tensor in state.values())


@pytest.mark.parametrize(("name", "count"), [("shallow", 3), ("shallow", 6), ("deep", 2), ("convolutional", 2)])
def test_permuted_copies_average_to_the_original(name, count):
    members, network, data = planted(name, count)
    assert_back(merge_many(members, data, repair="none"), network, data)


def test_matching_preserves_functions_and_reduces_distances(members, data):
    inputs, before = data.test.inputs, distances(members)
    for rounds in (1, 2, 100):
        matched = align(members, data, method="merge_many", rounds=rounds)
        assert distances(matched) <= before + 1e-5
        before = distances(matched)
    assert before < distances(members)
    torch.testing.assert_close(matched.eval()(inputs), members.eval()(inputs), rtol=1e-4, atol=1e-5)


def test_two_members_with_one_hidden_layer_are_matched_as_to_a_reference(members, data):
    """With two members there is one distance, and one hidden layer has one optimum."""
    pair = members[:2]
    assert distances(align(pair, data, method="merge_many")) == pytest.approx(distances(align(pair, data)), rel=1e-5)


def test_in_the_end_each_member_is_matched_to_the_mean_of_the_others():
    """One hidden layer has one optimum, so that matching again moves nothing."""
    make, shape = NETWORKS["shallow"]
    members, data = DeepEnsemble([drawn(make, seed) for seed in range(4)]), pixels(shape)
    matched = align(members, data, method="merge_many")
    for index in range(4):
        others = matched[[other for other in range(4) if other != index]]
        pair = DeepEnsemble([others.network(others.mean_state()), matched.member(index)])
        torch.testing.assert_close(dict(align(pair, data).state_dict()), dict(pair.state_dict()))


@pytest.mark.parametrize("merge", [merge_many, weight_matching])
def test_there_must_be_a_round(merge, members, data):
    with pytest.raises(EnfoldError, match="rounds"):
        merge(members, data, rounds=0)
