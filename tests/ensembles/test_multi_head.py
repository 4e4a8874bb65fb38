"""MultiHead: linear heads on one representation."""

from functools import partial

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.cost import flops, parameters
from enfold.ensembles.common.branching import last_layer
from enfold.ensembles.multi_head import MultiHead
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet, ViT
from enfold.train import TrainConfig
from fitting import any_network, fitted


def test_only_heads_are_owned_and_give_equation_1():
    network, inputs = ResNet(width=4, depth=8, num_classes=5).eval(), torch.randn(6, 3, 8, 8)
    members = MultiHead(network, 3).eval()
    own = members.own.state()
    assert sorted(own) == ["head.bias", "head.weight"]
    hidden = []
    network.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    network(inputs)
    expected = torch.einsum("mcd,bd->mbc", own["head.weight"], hidden[0]) + own["head.bias"][:, None]
    torch.testing.assert_close(members(inputs), expected, rtol=1e-4, atol=1e-5)


def test_the_body_is_stored_and_run_once():
    network, inputs = MLP(6, [5, 4], 3), torch.randn(8, 6)
    members = MultiHead(network, 10)
    head = 4 * 3 + 3
    assert parameters(members) == parameters(network) + 9 * head
    assert flops(members, inputs) == flops(network, inputs) + 9 * 2 * 4 * 3


def test_it_is_a_tree_net_with_the_last_split():
    network = ViT((3, 8, 8), 4, width=8, depth=1, heads=2)
    heads, tree = MultiHead(network, 3, seed=2), TreeNet(network, 3, split="head", seed=2)
    for name, tensor in heads.expand().items():
        assert torch.equal(tensor, tree.expand()[name]), name


def test_the_last_layer_is_the_last_with_a_matrix():
    assert last_layer(MLP(4, [3], 2)) == "head"
    assert last_layer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.ReLU())) == "1"
    assert last_layer(nn.Sequential(nn.BatchNorm1d(3))) == "0"
    weighted = nn.Sequential(nn.Linear(4, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert last_layer(weighted) == "1"
    assert all(name.startswith("1.") for name in MultiHead(weighted, 2).own.state())


def test_heads_diverge_when_trained_on_the_same_examples():
    torch.manual_seed(0)
    data = three_clouds(96, 48, 48)
    build = partial(MultiHead, num_members=3)
    assert build(any_network()).configure(TrainConfig()).order == "shared"
    members = fitted(build(MLP(4, [16], 3)), data, TrainConfig(epochs=4, batch_size=16, lr=0.01))
    outputs = members(data.test.inputs)
    assert (outputs[0] - outputs[1]).abs().mean() > 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_members": 0}, r"num_members .*got 0"), ({"split": "haed"}, "got 'haed', did you mean 'head'")],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        MultiHead(MLP(6, [5, 5], 3), **settings)
    tied = MLP(4, [4], 4)
    tied.head.weight = tied.hidden[0].weight
    with pytest.raises(EnfoldError, match=r"'head\.weight' is tied to 'hidden\.0\.weight'"):
        MultiHead(tied, 2)
