"""Contracts of members on every network of the zoo: with every engine they equal their networks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from enfold import DeepEnsemble, EnfoldError, load, save
from enfold.engines.base import Loop
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import read_state
from zoo import CLASSES, ZOO, own_inputs, population

M = 3
SLOW_VMAP = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, for operations without a rule


def engines_of(name):
    """The engines that must run it."""
    kind = ZOO[name]
    return ["loop", *["stacked"] * kind.stacked, *["vmap"] * kind.vmap]


EVERY = [pytest.param(name, engine, id=f"{name}-{engine}") for name in ZOO for engine in engines_of(name)]


def same_draws(name, engine):
    """Whether the engine draws what the networks draw one after the other under the same seed."""
    return engine == "loop" or not ZOO[name].draws


def one_by_one(networks, inputs, each):
    torch.default_generator.manual_seed(0)
    return torch.stack([get_logits(net(inputs[k] if each else inputs)) for k, net in enumerate(networks)])


def all_at_once(members, inputs, each):
    torch.default_generator.manual_seed(0)
    return members.forward_each(inputs) if each else members(inputs)


def assert_same_state(network, other):
    ours, theirs = read_state(network), read_state(other)
    for name in theirs.keys() & ours.keys():
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda text, name=name: f"{name}: {text}")
    assert theirs.keys() <= ours.keys()


@pytest.mark.combinations
@SLOW_VMAP
@pytest.mark.parametrize(("name", "engine"), EVERY)
def test_members_are_their_networks_in_eval_and_train_mode(name, engine):
    networks = population(name)
    members = DeepEnsemble(networks, engine=engine)
    for training in (False, True, False):  # the engine is chosen in one mode and must be right in the other
        members.train(training)
        for network in networks:
            network.train(training)
        if training and not same_draws(name, engine):
            continue
        for each in (False, True):
            inputs = own_inputs(name, 5) if each else ZOO[name].inputs(5)
            outputs = all_at_once(members, inputs, each)
            assert outputs.shape == (M, 5, CLASSES)
            torch.testing.assert_close(outputs, one_by_one(networks, inputs, each))
        for index, network in enumerate(networks):
            assert_same_state(network, members.member(index))


@pytest.mark.combinations
@SLOW_VMAP
@pytest.mark.parametrize(("name", "engine"), EVERY)
def test_gradients_equal_those_of_single_networks(name, engine):
    networks = population(name)
    members = DeepEnsemble(networks, engine=engine).train(not ZOO[name].draws)
    inputs, labels = own_inputs(name, 6), torch.arange(6) % CLASSES
    loss = sum(F.cross_entropy(logits, labels) for logits in members.forward_each(inputs))
    loss.backward()
    grads = {id(parameter): parameter.grad for parameter in members.parameters()}
    for index, network in enumerate(networks):
        network.train(members.training)
        F.cross_entropy(get_logits(network(inputs[index])), labels).backward()
        for key, tensor in read_state(network).items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                grad = grads[id(members.expand()[key])]
                assert grad is not None, f"{key} gets no gradient"
                torch.testing.assert_close(grad[index], tensor.grad, atol=1e-5, rtol=1e-4)
            elif isinstance(tensor, nn.Parameter):
                assert grads[id(members.expand()[key])] is None


@pytest.mark.parametrize("name", [name for name, kind in ZOO.items() if kind.stacked])
def test_stacked_products_are_right_for_every_batch_size(name):
    networks = population(name)
    members = DeepEnsemble([network.eval() for network in networks], engine="stacked")
    for batch in (2 if name == "batch_norm_plain" else 1, 16, 17, 40):  # up to 16 one wide product is used
        shared, own = ZOO[name].inputs(batch), own_inputs(name, batch)
        torch.testing.assert_close(members(shared), one_by_one(networks, shared, False))
        torch.testing.assert_close(members.forward_each(own), one_by_one(networks, own, True))


@pytest.mark.parametrize("name", [name for name, kind in ZOO.items() if not kind.stacked])
def test_stacked_products_are_refused_where_they_would_be_wrong(name):
    members = DeepEnsemble(population(name), engine="stacked")
    with pytest.raises(EnfoldError, match=r"the engine 'stacked' cannot run this network because .*: use engine="):
        members(ZOO[name].inputs(4))
    assert isinstance(members.set_engine("auto").choose_engine(ZOO[name].inputs(4)), Loop)


@pytest.mark.parametrize("name", [name for name, kind in ZOO.items() if not kind.vmap])
def test_vmap_is_refused_where_torch_cannot_do_it(name):
    with pytest.raises(EnfoldError, match="the engine 'vmap' cannot run this network because"):
        DeepEnsemble(population(name), engine="vmap")(ZOO[name].inputs(4))


@pytest.mark.parametrize("name", ZOO)
def test_given_networks_are_not_modified(name):
    networks = population(name)
    before = [{key: tensor.clone() for key, tensor in read_state(network).items()} for network in networks]
    flags = [[(part.training, *vars(part)) for part in network.modules()] for network in networks]
    members = DeepEnsemble(networks).train()
    members(ZOO[name].inputs(4)).sum().backward()
    with torch.no_grad():
        for parameter in members.parameters():
            parameter.add_(1.0)
    for network, state, flag in zip(networks, before, flags, strict=True):
        found = read_state(network)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert [(part.training, *vars(part)) for part in network.modules()] == flag
        assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_members_made_are_the_first_of_more(name):
    few, more = DeepEnsemble(ZOO[name].make, 2, seed=7), DeepEnsemble(ZOO[name].make, 3, seed=7)
    for index in range(2):
        ours, theirs = read_state(few.member(index)), read_state(more.member(index))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert few.seeds == more.seeds[:2]
    assert len(set(more.seeds)) == 3


@pytest.mark.parametrize("name", ZOO)
def test_saved_and_loaded_is_equal(name, tmp_path):
    members = DeepEnsemble(population(name))
    found = load(save(members, tmp_path / "members.safetensors"), ZOO[name].make)
    assert isinstance(found, DeepEnsemble)
    assert_equal(found, members)
    network = members.member(1)
    again = load(save(network, tmp_path / "one.safetensors"), ZOO[name].make)
    assert type(again) is type(network)
    assert_equal(again, network)


def assert_equal(model, other):
    ours, theirs = read_state(model), read_state(other)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_copies_are_equal_and_independent(name):
    members = DeepEnsemble(population(name), engine="loop").eval()
    members(ZOO[name].inputs(2))  # a network that has run may hold more than a new one
    before = {key: tensor.detach().clone() for key, tensor in members.expand().items()}
    copies = [members[:2], members[[2, 0]], DeepEnsemble([*members, members.member(-1)]), copy.deepcopy(members)]
    for duplicate, indices in zip(copies, [[0, 1], [2, 0], [0, 1, 2, 2], [0, 1, 2]], strict=True):
        assert (duplicate.num_members, duplicate.training) == (len(indices), False)
        for key, tensor in duplicate.expand().items():
            torch.testing.assert_close(tensor, before[key][indices], rtol=0, atol=0)
    with torch.no_grad():
        for model in [*copies, *members]:
            for tensor in read_state(model).values():
                tensor.fill_(2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in members.expand().items())


@pytest.mark.parametrize("name", ZOO)
def test_an_extracted_member_trains_like_the_original_network(name):
    """It has the user's class, ties, frozen parameters and state_dict."""
    network, inputs = population(name, 1)[0], ZOO[name].inputs(4)
    taken = DeepEnsemble([network]).member(0)
    assert type(taken) is type(network)
    assert list(taken.state_dict()) == list(network.state_dict())
    for model in (taken, network):
        torch.default_generator.manual_seed(0)
        get_logits(model(inputs)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_state(taken, network)


@pytest.mark.parametrize("name", ZOO)
def test_state_dict_and_precision_survive(name):
    members, other = (
        DeepEnsemble(networks, engine="loop").eval() for networks in (population(name), population(name)[::-1])
    )
    other.load_state_dict(members.state_dict())
    assert_equal(other, members)
    inputs = ZOO[name].inputs(5)
    precise = other.double()(inputs.double() if inputs.is_floating_point() else inputs)
    assert precise.dtype == torch.float64
    torch.testing.assert_close(precise.float(), members(inputs), atol=1e-5, rtol=1e-4)
    assert {parameter.dtype for parameter in other.member(0).parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["mlp", "batch_norm_2d", "dictionary"])
def test_the_mean_is_one_of_probabilities(name):
    members = DeepEnsemble(population(name)).eval()
    inputs = ZOO[name].inputs(4)
    probabilities = torch.softmax(members(inputs), -1).mean(0)
    torch.testing.assert_close(members.forward_mean(inputs), probabilities.log())
    torch.testing.assert_close(members.forward_mean(inputs).exp().sum(-1), torch.ones(4))
