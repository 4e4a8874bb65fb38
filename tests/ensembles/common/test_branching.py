"""Where a network is split: by the path of a module, by patterns, and in its middle."""

import pytest
import torch
from torch import nn

from enfold.ensembles.common.branching import middle_module, split_names
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ResNet, ViT, WideResNet
from specimens import Apply


def test_the_default_split_is_in_the_middle_and_splits_no_block():
    splits = {
        "hidden.2": MLP(),
        "groups.1.1": ResNet(),
        "blocks.2": ViT(),
        "convs.2": MediumCNN((3, 32, 32), 10),
        "": nn.Linear(4, 3),
    }
    assert {split: middle_module(network) for split, network in splits.items()} == {split: split for split in splits}
    assert middle_module(WideResNet(16, 2, 10)).count(".") == 2  # a group and a block in it
    wrapped = nn.ModuleDict({"body": ResNet(), "head": nn.Linear(10, 3)})
    assert middle_module(wrapped) == "body.groups.1.1"


@pytest.mark.parametrize("depth", range(1, 10))
def test_the_default_split_of_a_chain_is_its_middle(depth):
    network = MLP(3, [4] * depth, 2)
    behind = sum(name.endswith("weight") for name in split_names(network, middle_module(network)))
    assert behind == (depth + 2) // 2  # of depth + 1 layers; of two middles the first


def test_branches_own_their_buffers():
    members = TreeNet(ResNet(width=4, depth=8), 2, split="groups.2")
    own = members.own.state()
    assert own["groups.2.0.norm1.running_mean"].shape == (2, 16)
    assert "head.bias" in own
    assert all(name.startswith(("groups.2", "head")) for name in own)
    assert members.shared.state()["groups.1.0.norm1.running_mean"].shape == (8,)


def test_patterns_name_a_branch_that_the_order_of_modules_does_not():
    network = Apply(lambda net, x: net.head(torch.relu(net.body(x))), head=nn.Linear(5, 3), body=nn.Linear(4, 5))
    members = TreeNet(network, 2, branch=("^head$",))
    assert sorted(members.own.state()) == ["head.bias", "head.weight"]
    assert sorted(TreeNet(network, 2, branch=("bias",)).own.state()) == ["body.bias", "head.bias"]


def test_a_split_without_later_parameters_is_refused():
    network = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.ReLU())
    with pytest.raises(EnfoldError, match="must have parameters behind it, got '1' with none: split at '0'"):
        TreeNet(network, 2, split="1")
    statistics = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    with pytest.raises(EnfoldError, match="parameters behind it, got '1'"):
        TreeNet(statistics, 2, split="1")
    with pytest.raises(EnfoldError, match="got only the buffers 1"):
        TreeNet(statistics, 2, branch=("running_mean",))
    with pytest.raises(EnfoldError, match="Flatten has none"):
        TreeNet(nn.Flatten(), 2)


@pytest.mark.slow
def test_weights_tied_across_the_split_are_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    network[2].weight = network[0].weight
    with pytest.raises(EnfoldError, match=r"'2\.weight' is tied to '0\.weight' across it"):
        TreeNet(network, 2, split="2")
    for split in ("4", "0"):
        members = TreeNet(network, 2, split=split)
        inputs = torch.randn(5, 4)
        torch.testing.assert_close(members(inputs), torch.stack([member(inputs) for member in members]))
        tied = members.member(1)
        assert tied[2].weight is tied[0].weight
    layer = nn.Linear(4, 4)
    with pytest.raises(EnfoldError, match=r"'2\.weight' is tied to '0\.weight'"):
        TreeNet(nn.Sequential(layer, nn.Tanh(), layer), 2, split="2")
