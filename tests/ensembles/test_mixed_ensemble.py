"""MixedEnsemble: networks of different architectures as one predictor, and the groups that an optimizer is given."""

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, EnfoldError, MixedEnsemble
from enfold.engines.modes import eval_mode
from enfold.engines.parameters import decay_groups
from zoo import CLASSES, ZOO, population, vectors


def test_different_networks_predict_together():
    networks = [population(name, 1)[0] for name in ("mlp", "bare_linear", "dictionary", "output_object")]
    mixed = MixedEnsemble(networks)
    inputs = vectors(5)
    outputs = mixed(inputs)
    assert (mixed.num_members, outputs.shape) == (4, (4, 5, CLASSES))
    torch.testing.assert_close(outputs[1], networks[1](inputs))
    torch.testing.assert_close(outputs[2], networks[2](inputs)["logits"])
    mean = torch.softmax(outputs, -1).mean(0).log()
    torch.testing.assert_close(mixed.forward_mean(inputs), mean)


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ([], r"networks .*got none"),
        (
            [DeepEnsemble(population("mlp"))],
            r"networks .*got a DeepEnsemble",
        ),
    ],
)
def test_other_types_than_networks_are_refused(networks, message):
    with pytest.raises(EnfoldError, match=message):
        MixedEnsemble(networks)


def test_members_must_have_the_same_classes():
    mixed = MixedEnsemble([nn.Linear(6, 3), nn.Linear(6, 4)])
    with pytest.raises(EnfoldError, match=r"the same number of classes, got \[\(3,\), \(4,\)\]"):
        mixed(vectors(2))


def test_a_network_without_logits_is_refused():
    with pytest.raises(EnfoldError, match=r"must return a tensor.* got a tuple"):
        MixedEnsemble([nn.LSTM(6, 3)])(vectors(2))


def test_modes_of_modules_are_restored():
    network = population("batch_norm_1d", 1)[0]
    network[2].eval()
    members = DeepEnsemble([network, network])
    members.skeleton.network[0].eval()
    outer = nn.ModuleList([members, network.train()])
    network[0].eval()
    parts = [*outer.modules(), *members.skeleton.network.modules()]
    before = [part.training for part in parts]
    assert True in before
    assert False in before
    with eval_mode(outer):
        assert not any(part.training for part in parts)
    assert [part.training for part in parts] == before
    with pytest.raises(ZeroDivisionError), eval_mode(members):
        raise ZeroDivisionError
    assert [part.training for part in parts] == before


def test_a_user_class_named_skeleton_is_supported():
    network = ZOO["mlp"].make()
    network.skeleton = torch.eye(3)
    with eval_mode(network):
        assert not network.training
    assert network.training


def test_weight_decay_may_be_limited_to_weights():
    members = DeepEnsemble(population("batch_norm_1d"))
    (group,) = members.param_groups(0.1)
    assert (len(group["params"]), group["weight_decay"], group["member_axis"]) == (8, 0.1, True)
    weights, others = members.param_groups(0.1, "weights")
    assert {tuple(tensor.shape) for tensor in weights["params"]} == {(3, 8, 6), (3, 3, 8)}
    assert (weights["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {id(tensor) for group in (weights, others) for tensor in group["params"]} == {
        id(tensor) for tensor in members.parameters()
    }
    assert decay_groups([], 0.1, "all", lr_scale=2.0) == [{"params": [], "weight_decay": 0.1, "lr_scale": 2.0}]
