"""DeepEnsemble: construction of members, and arguments that are refused."""

import copy

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, EnfoldError, Ensemble
from enfold.engines.skeleton import State
from enfold.errors import SeparateModulesWarning
from zoo import ZOO, population, vectors


def linear(seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(6, 3, **options)


def test_stacked_products_by_hand():
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    with torch.no_grad():
        one.weight.copy_(torch.tensor([[1.0, 2.0]]))
        one.bias.fill_(0.5)
        two.weight.copy_(torch.tensor([[-1.0, 0.0]]))
        two.bias.zero_()
    inputs = torch.tensor([[1.0, 1.0], [3.0, -1.0]])
    assert DeepEnsemble([one, two])(inputs).tolist() == [[[3.5], [1.5]], [[-1.0], [-3.0]]]


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ([], r"networks .*got none"),
        (nn.Sequential(nn.Linear(2, 2)), r"num_members .*got None"),
        ([nn.ReLU(), nn.ReLU()], "must have parameters to differ in, but ReLU has none"),
        (
            [nn.Linear(2, 2), nn.Bilinear(2, 2, 2)],
            "member 0 has a Linear.* and member 1 a Bilinear.*: use MixedEnsemble",
        ),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], r"out_features=2.*member 1 a Linear\(.*out_features=3"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], "bias=True.*bias=False"),
        (
            [nn.Linear(2, 2), nn.Linear(2, 2).double()],
            r"same types of numbers, but 'weight' is torch\.float32 in member 0 and torch\.float64 in member 1: conv",
        ),
        (
            [nn.Linear(2, 2), nn.Linear(2, 2, device="meta")],
            r"same device, but 'weight' is cpu in member 0 and meta in member 1: move it with network\.to\(\"cpu\"\)",
        ),
        (
            [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.ReLU())],
            "in '1' member 0 has nothing and member 1 a ReLU",
        ),
        (
            [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())],
            "in '1' member 0 has a ReLU.* and member 1 a Tanh",
        ),
        (
            [nn.Sequential(nn.Conv2d(1, 1, 3, stride=k)) for k in (1, 2)],
            r"in '0' member 0 has a Conv2d\(.*stride=\(1, 1\)\) and member 1 a Conv2d\(.*stride=\(2, 2\)\)",
        ),
        ([nn.Sequential(nn.Linear(2, 2), nn.Dropout(p)) for p in (0.1, 0.2)], "p=0.1.*p=0.2"),
    ],
)
def test_different_architectures_are_refused(networks, message):
    with pytest.raises(EnfoldError, match=message):
        DeepEnsemble(networks)


def test_other_parameters_and_shapes_are_refused_by_name():
    class Raw(nn.Module):
        def __init__(self, names, size):
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    with pytest.raises(EnfoldError, match=r"'a' is \(2,\) in member 0 and \(3,\) in member 1: use MixedEnsemble"):
        DeepEnsemble([Raw("a", 2), Raw("a", 3)])
    with pytest.raises(EnfoldError, match="member 1 differs in 'b': use MixedEnsemble"):
        DeepEnsemble([Raw("a", 2), Raw("ab", 2)])
    untied, tied = population("tied", 2)
    untied[0][2].weight = nn.Parameter(tied[0][2].weight.detach().clone())
    with pytest.raises(EnfoldError, match=r"member 1 differs in '0\.2\.weight'"):
        DeepEnsemble([untied, tied])


def test_a_plain_tensor_that_differs_between_networks_is_carried():
    class Features(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.project = nn.Module()
            self.project.matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x @ self.project.matrix)

    networks = [Features(0), Features(1)]
    with pytest.warns(SeparateModulesWarning, match="member 1"):
        torch.testing.assert_close(
            DeepEnsemble(networks)(vectors(4)), torch.stack([net(vectors(4)) for net in networks])
        )
    networks = [Features(0), Features(0)]  # the same for all: it is part of the architecture
    torch.testing.assert_close(DeepEnsemble(networks)(vectors(4)), torch.stack([net(vectors(4)) for net in networks]))


def test_networks_with_stored_activations_make_an_ensemble():
    networks = population("kept_activations")
    for index, network in enumerate(networks):
        network(vectors(3 + index)).sum().backward()
    torch.testing.assert_close(DeepEnsemble(networks)(vectors(4)), torch.stack([net(vectors(4)) for net in networks]))


@pytest.mark.parametrize("num_members", [0, -1])
def test_zero_members_are_refused(num_members):
    with pytest.raises(EnfoldError, match=rf"num_members .*got {num_members}"):
        DeepEnsemble(linear, num_members)


def test_initialisation_depends_on_the_seed_only():
    torch.default_generator.manual_seed(3)
    state = torch.get_rng_state()
    members = DeepEnsemble(ZOO["mlp"].make, 3, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.default_generator.manual_seed(4)
    again = DeepEnsemble(ZOO["mlp"].make, 3, seed=5)
    for key, tensor in members.expand().items():
        assert torch.equal(tensor, again.expand()[key])
        assert not torch.equal(tensor, DeepEnsemble(ZOO["mlp"].make, 3, seed=6).expand()[key])
        assert len(tensor.flatten(1).unique(dim=0)) == 3
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(again.seeds[1])
        alone = ZOO["mlp"].make()
    assert torch.equal(alone[0].weight, members.member(1)[0].weight)


def test_a_factory_that_ignores_the_seed_is_warned_about():
    network = linear()
    with pytest.warns(UserWarning, match="all 2 members are equal in every parameter"):
        members = DeepEnsemble(lambda: network, 2)
    assert members.equal_parameters() == ["weight", "bias"]
    assert DeepEnsemble(lambda: network, 1).num_members == 1


def test_a_factory_must_make_networks():
    with pytest.raises(EnfoldError, match=r"must return an nn.Module, got tuple"):
        DeepEnsemble(lambda: (linear(), 1), 2)


def test_equal_parameters_are_reported_by_name():
    assert DeepEnsemble(ZOO["batch_norm_1d"].make, 2).equal_parameters() == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert DeepEnsemble(population("mlp")).equal_parameters() == []


def test_members_are_a_sequence_of_networks():
    networks = population("mlp")
    members = DeepEnsemble(networks)
    assert len(members) == len(members.networks()) == 3
    for index, network in enumerate(members):
        assert torch.equal(network[0].weight, networks[index][0].weight)
    assert torch.equal(members[-1][0].weight, networks[2][0].weight)
    assert torch.equal(members[1:].expand()["0.bias"][0], networks[1][0].bias)
    for index in (3, -4):
        with pytest.raises(EnfoldError, match=rf"index .*got {index}"):
            members.member(index)
    with pytest.raises(EnfoldError, match=r"networks .*got none"):
        members[5:]
    assert repr(members) == "DeepEnsemble(3 x Sequential, 249 parameters, engine='auto')"


def test_members_may_be_given_as_members_or_a_module_list():
    members = DeepEnsemble(population("mlp"))
    for given in (members, nn.ModuleList(population("mlp")), tuple(population("mlp"))):
        assert torch.equal(DeepEnsemble(given).expand()["0.weight"], members.expand()["0.weight"])


def test_each_member_needs_a_batch():
    with pytest.raises(EnfoldError, match=r"got 2 batches for 3 members: pass inputs of shape \(M, B, \.\.\.\)"):
        DeepEnsemble(population("mlp")).forward_each(torch.zeros(2, 4, 6))


def test_a_copy_inside_another_module_is_complete():
    members = DeepEnsemble(population("frozen"), engine="loop")
    members.seeds = (1, 2, 3)
    members.tree.get_parameter("2.bias").requires_grad_(False)
    outer = nn.ModuleDict({"a": members, "b": nn.ModuleList([members])})
    outer["a"](vectors(3))
    duplicate = copy.deepcopy(outer)
    assert duplicate["a"] is duplicate["b"][0]
    found = duplicate["a"]
    assert (type(found), found.seeds, found.engine) == (DeepEnsemble, (1, 2, 3), "loop")
    flags = [parameter.requires_grad for parameter in found.parameters()]
    assert flags == [parameter.requires_grad for parameter in members.parameters()] == [False, False, True, False]
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert found(vectors(3)).abs().sum() == 0  # it runs on its own parameters
    assert members(vectors(3)).abs().sum() > 0


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
def test_a_copy_of_a_used_ensemble_has_its_own_engine(engine):
    members = DeepEnsemble(population("batch_norm_1d"), engine=engine)
    members(vectors(4))
    duplicate = copy.deepcopy(members)
    before = {key: tensor.clone() for key, tensor in members.expand().items()}
    duplicate(vectors(5))
    assert all(torch.equal(tensor, before[key]) for key, tensor in members.expand().items())
    assert not torch.equal(duplicate.expand()["0.running_mean"], before["0.running_mean"])


class Shifted(Ensemble):
    """A minimal method: one network, and an offset per member."""

    def __init__(self, network, num_members):
        super().__init__(network, num_members)
        self.shared = copy.deepcopy(network)
        self.offset = nn.Parameter(torch.arange(float(num_members)))

    def expand(self) -> State:
        return {
            name: tensor + self.offset.view(-1, *(1,) * tensor.ndim) for name, tensor in self.shared.named_parameters()
        }


@pytest.mark.parametrize("engine", ["stacked", "loop", "vmap"])
def test_any_subclass_with_expand_can_be_run(engine):
    members = Shifted(linear(), 3).set_engine(engine)
    inputs = vectors(4)
    outputs = members(inputs)
    torch.testing.assert_close(outputs, torch.stack([network(inputs) for network in members]))
    outputs.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in members.parameters())
    assert [type(network) for network in members[:2]] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(copy.deepcopy(members)(inputs), outputs)
    groups = members.param_groups(0.1, "weights")
    assert [len(group["params"]) for group in groups] == [1, 2]


def test_a_subclass_needs_members():
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        Shifted(linear(), 0)
