"""Reinitialisation: every trainable parameter is drawn as by its own module."""

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble
from enfold.engines.initialization import initialize_member, make_blank, reinitialise
from enfold.errors import InitialisationWarning
from enfold.networks import ViT
from zoo import CLASSES, ZOO, Apply, population, vectors


@pytest.mark.parametrize("name", ZOO)
def test_reinitialised_members_differ_in_every_random_parameter(name):
    network = population(name, 1)[0]
    members = DeepEnsemble(network, 3, seed=1)
    state = members.expand()
    for key, tensor in network.named_parameters():
        found = state[key]
        if not tensor.requires_grad:
            assert torch.equal(found, tensor.expand_as(found)), f"{key} is frozen"
        elif tensor.numel() > 1 and tensor.std() > 0:
            assert len(found.flatten(1).unique(dim=0)) == 3, f"{key} is not drawn anew"
            assert not any(torch.equal(member, tensor) for member in found)


def test_the_given_network_is_not_modified():
    network = population("batch_norm_1d", 1)[0]
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    members = DeepEnsemble(network, 2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    assert (members.expand()["0.running_mean"] == 0).all()  # statistics of another network would be no fresh start
    assert (members.expand()["0.running_var"] == 1).all()


def test_attention_is_initialised_as_in_torch():
    network = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(3.0)
    reinitialise(network)
    bound = (6 / (8 + 24)) ** 0.5  # Xavier
    assert float(network.in_proj_weight.detach().abs().max()) <= bound
    assert len(network.in_proj_weight.unique()) == 192
    assert (network.in_proj_bias == 0).all()
    assert (network.out_proj.bias == 0).all()


def test_the_outermost_reset_parameters_wins():
    network = reinitialise(ViT((1, 8, 8), CLASSES, patch=4, width=8, depth=1, heads=2))
    assert (network.blocks[0].linear1.bias == 0).all()
    assert 0.01 < float(network.positions.detach().std()) < 0.03

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.raw = nn.Linear(3, 3), nn.Module()
            self.raw.weight = nn.Parameter(torch.randn(4))
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.eye_(self.inner.weight)
            nn.init.uniform_(self.raw.weight, 5.0, 6.0)

    outer = reinitialise(Outer())
    assert torch.equal(outer.inner.weight, torch.eye(3))
    assert (outer.raw.weight >= 5).all()


def test_raw_parameters_keep_their_mean_and_standard_deviation():
    network = Apply(
        lambda net, x: x, weight=nn.Parameter(torch.randn(50, 50) * 0.1 + 2), gain=nn.Parameter(torch.ones(4))
    )
    before = network.weight.detach().clone()
    reinitialise(network)
    assert not torch.isclose(network.weight, before).all()
    torch.testing.assert_close(network.weight.mean(), before.mean(), atol=0.01, rtol=0)
    torch.testing.assert_close(network.weight.std(), before.std(), atol=0.01, rtol=0)
    assert (network.gain == 1).all()


def test_frozen_parameters_are_preserved():
    network = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    network[0].requires_grad_(False)
    pretrained = network[0].weight.clone()
    members = DeepEnsemble(network, 2)
    assert torch.equal(members.expand()["0.weight"], pretrained.expand(2, 6, 6))
    assert members.equal_parameters() == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not members.member(0)[0].weight.requires_grad


@pytest.mark.parametrize("name", ["mlp", "nested", "residual", "attention", "vit", "lstm", "listed_twice"])
def test_a_member_depends_on_its_seed_only(name):
    made, seed = initialize_member(ZOO[name].make, 3, 1)
    again, same = initialize_member(made, 3, 1)
    assert seed == same
    for key, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    assert initialize_member(ZOO[name].make, 3, 2)[1] != seed


def test_a_blank_network_does_not_use_the_global_generator():
    state = torch.get_rng_state()
    network = make_blank(ZOO["mlp"].make)
    assert torch.equal(torch.get_rng_state(), state)
    duplicate = make_blank(network)
    assert duplicate is not network
    torch.testing.assert_close(duplicate(vectors(2)), network(vectors(2)))


class Packaged(nn.Module):
    """A network that a package starts in its own way: small embeddings, small weights and no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.inner.bias)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(tokens)).relu().mean(1))


def spreads(members: DeepEnsemble) -> dict[str, list[float]]:
    return {name: tensor.flatten(1).std(1).tolist() for name, tensor in members.expand().items() if tensor.ndim > 1}


def test_initialisation_by_a_factory_is_preserved():
    found = spreads(DeepEnsemble(Packaged, 3))
    assert found["embedding.weight"] == pytest.approx([0.02] * 3, rel=0.2)
    assert found["inner.weight"] == pytest.approx([0.02] * 3, rel=0.2)


def test_the_scale_of_a_given_network_is_preserved_with_a_warning():
    with pytest.warns(InitialisationWarning, match=r"'embedding\.weight' and 1 more"):
        members = DeepEnsemble(Packaged(), 3)
    found = spreads(members)
    assert found["embedding.weight"] == pytest.approx([0.02] * 3, rel=0.2)
    assert found["inner.weight"] == pytest.approx([0.02] * 3, rel=0.3)
    assert found["inner.bias"] == found["head.weight"] == [0.0] * 3, "zeros stay zeros"
    assert len(members.expand()["embedding.weight"].flatten(1).unique(dim=0)) == 3


def test_a_trained_network_is_reinitialised_by_its_layers():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))
    network(vectors(4))
    with torch.no_grad():
        network[0].weight.mul_(3.0)
    members = DeepEnsemble(network, 2)
    assert spreads(members)["0.weight"] == pytest.approx([1 / 6**0.5 / 3**0.5] * 2, rel=0.2)
    with torch.no_grad():
        network[0].weight.mul_(10.0)
    with pytest.warns(InitialisationWarning, match=r"'0\.weight'"):
        found = spreads(DeepEnsemble(network, 2))
    assert found["0.weight"] == pytest.approx([float(network[0].weight.detach().std())] * 2, rel=0.2)
