"""Hydra: heads that start as copies of a trained one."""

import pytest
import torch
import torch.nn.functional as F

import enfold
from clouds import three_clouds
from enfold.cost import parameters
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.errors import EnfoldError
from enfold.networks import MLP, ResNet
from enfold.train import TrainConfig, fit
from fitting import fitted


def trained(data):
    torch.manual_seed(0)
    network = MLP(4, [8], 3)
    fit(network, data, config=TrainConfig(epochs=3, batch_size=16, lr=0.01), quiet=True)
    return network


def test_without_noise_all_heads_agree_with_the_trained_one():
    data = three_clouds(64, 32, 32)
    network = trained(data)
    members = HydraEnsemble(network, 5, noise=0.0).eval()
    torch.testing.assert_close(members(data.test.inputs), network(data.test.inputs).expand(5, 32, 3), rtol=0, atol=1e-6)


def test_noise_makes_heads_differ_and_does_not_change_the_body():
    network = ResNet(width=4, depth=8)
    members = HydraEnsemble(network, 3, split="groups.2", noise=0.05)
    state = network.state_dict()
    for name, tensor in members.shared.state().items():
        assert torch.equal(tensor, state[name]), name
    own = members.own.state()
    for name in ("groups.2.0.conv1.weight", "groups.2.0.norm1.weight", "head.weight"):
        moved = (own[name] - state[name]).square().flatten(1).mean(1).sqrt() / state[name].square().mean().sqrt()
        torch.testing.assert_close(moved, torch.full((3,), 0.05), rtol=0.5, atol=0)
        assert not torch.equal(own[name][0], own[name][1])
    assert torch.equal(own["groups.2.0.norm1.running_var"][2], state["groups.2.0.norm1.running_var"])


def test_the_count_of_heads_on_the_last_layer():
    network = MLP(6, [5], 3)
    assert parameters(HydraEnsemble(network, 20)) == parameters(network) + 19 * (5 + 1) * 3


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_a_frozen_body_leaves_independent_convex_problems():
    """A head's gradient is that of its own loss; with decay all heads converge to one optimum from any start."""
    data = three_clouds(64, 0, 32)
    network = trained(data)
    network.hidden.requires_grad_(False)
    members = HydraEnsemble(network, 3, noise=2.0)
    before = {name: tensor.clone() for name, tensor in members.shared.state().items()}
    heads = [parameter for parameter in members.own.parameters() if parameter.requires_grad]
    losses = [F.cross_entropy(logits, data.train.labels) for logits in members(data.train.inputs)]
    for index, loss in enumerate(losses):
        for gradient in torch.autograd.grad(loss, heads, retain_graph=True):
            others = [row for row in range(3) if row != index]
            assert gradient[index].any()
            assert not gradient[others].any()
    weights = members.own.state()["head.weight"]
    assert (weights[0] - weights[1]).abs().max() > 0.1
    plan = TrainConfig(
        epochs=150, batch_size=64, optimizer="sgd", lr=0.5, weight_decay=0.05, schedule="constant",
        order="shared", select="last",
    )  # fmt: skip
    fit(members, data, config=plan, quiet=True)
    torch.testing.assert_close(weights, weights[:1].expand_as(weights), rtol=0, atol=1e-3)
    for name, tensor in members.shared.state().items():
        assert torch.equal(tensor, before[name]), name


def test_members_are_the_first_of_more_and_seeds_matter():
    network = MLP(6, [5], 3)
    few, more = HydraEnsemble(network, 2).expand(), HydraEnsemble(network, 3).expand()
    assert torch.equal(few["head.weight"], more["head.weight"][:2])
    assert not torch.equal(HydraEnsemble(network, 2, seed=1).expand()["head.weight"], few["head.weight"])


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_trained_saved_and_loaded(tmp_path):
    data = three_clouds(64, 0, 32)
    network = trained(data)
    members = fitted(HydraEnsemble(network, 3), data, TrainConfig(epochs=2, batch_size=16))
    enfold.save(members, tmp_path / "hydra.safetensors")
    loaded = enfold.load(tmp_path / "hydra.safetensors", network)
    assert loaded.options() == members.options()
    torch.testing.assert_close(loaded(data.test.inputs), members(data.test.inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_members": 0}, r"num_members .*got 0"),
        ({"noise": -0.1}, r"noise .*got -0\.1"),
        ({"noise": float("nan")}, r"noise .*got nan"),
        ({"split": "haed"}, "did you mean 'head'"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        HydraEnsemble(MLP(6, [5, 5], 3), **settings)
