"""The skeleton: values are in the network for one call, and nothing is left behind."""

import copy

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, EnfoldError
from enfold.engines.skeleton import Skeleton, copy_network, find_places, read_state
from zoo import ZOO, Apply, population, vectors


def is_empty(skeleton):
    tensors = [*skeleton.network.parameters(), *skeleton.network.buffers()]
    return all(tensor.is_meta for tensor in tensors)


def cloned(network):
    return {name: tensor.detach().clone() for name, tensor in read_state(network).items()}


def test_a_tied_tensor_has_one_name_and_several_places():
    parameters, buffers = find_places(ZOO["tied"].make())
    assert {name: len(where) for name, where in parameters.items()} == {
        "0.0.weight": 2,
        "0.0.bias": 1,
        "0.2.bias": 1,
        "1.weight": 1,
        "1.bias": 1,
    }
    assert not buffers


def test_a_lazy_parameter_is_refused_by_name():
    with pytest.raises(EnfoldError, match=r"'1\.weight' is not: run one batch"):
        DeepEnsemble([nn.Sequential(nn.ReLU(), nn.LazyLinear(3))])


@pytest.mark.parametrize("name", ["tied", "listed_twice", "residual", "reassigned_buffer"])
def test_the_network_has_values_during_a_call_only(name):
    network = population(name, 1)[0].eval()
    skeleton, state = Skeleton(network), cloned(network)
    assert is_empty(skeleton)
    inputs = ZOO[name].inputs(3)
    with skeleton.use_values(state) as held:
        torch.testing.assert_close(held(inputs), network(inputs))
    assert is_empty(skeleton)


def test_a_reassigned_buffer_ends_up_in_the_state():
    network = ZOO["reassigned_buffer"].make()
    skeleton, state = Skeleton(network), cloned(network)
    mean = state["mean"]
    with skeleton.use_values(state) as held:
        held(vectors(4))
        held(vectors(5))
    network(vectors(4))
    network(vectors(5))
    torch.testing.assert_close(mean, network.mean)
    assert state["mean"] is mean
    assert state["calls"] == 2


def test_a_buffer_tied_in_two_places_may_be_reassigned_in_either():
    network = nn.Module()
    network.a, network.b = nn.Module(), nn.Module()
    network.a.register_buffer("mean", torch.zeros(2))
    network.b.register_buffer("mean", network.a.mean)
    skeleton, state = Skeleton(network), cloned(network)
    assert list(state) == ["a.mean"]
    with skeleton.use_values(state) as held:
        held.b.mean = torch.ones(2)
    assert state["a.mean"].tolist() == [1, 1]


def test_a_buffer_with_a_graph_is_stored_detached():
    def forward(net, x):
        outputs = net.layer(x)
        net.mean = outputs.mean(0)
        return outputs - net.mean

    members = DeepEnsemble([Apply(forward, layer=nn.Linear(6, 3), mean=torch.zeros(3)) for _ in range(2)])
    for _ in range(2):
        members(vectors(4)).square().sum().backward()
    assert not members.expand()["mean"].requires_grad
    assert members.expand()["mean"].abs().sum() > 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1), r"'mean' of shape \(3,\) to a tensor of shape \(1,\)"),
        (None, r"'mean' of shape \(3,\) to None"),
    ],
)
def test_a_buffer_must_keep_its_shape(value, message):
    def forward(net, x):
        net.mean = value
        return net.layer(x)

    members = DeepEnsemble(
        [Apply(forward, layer=nn.Linear(6, 3), mean=torch.zeros(3)) for _ in range(2)], engine="loop"
    )
    with pytest.raises(EnfoldError, match=message):
        members(vectors(4))
    assert is_empty(members.skeleton)
    assert members.expand()["mean"].shape == (2, 3)


def test_an_exception_in_the_forward_leaves_the_skeleton_clean():
    def forward(net, x):
        net.calls.add_(1)
        net.mean = net.mean + 1
        net.cache = torch.ones(2)
        if x.isnan().any():
            raise ZeroDivisionError("the user's own")
        return net.layer(x)

    network = Apply(forward, layer=nn.Linear(6, 3), mean=torch.zeros(3), calls=torch.zeros(()))
    network.register_buffer("cache", None)
    members = DeepEnsemble([network, network])
    expected = network(vectors(3)).detach()
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        members(torch.full((3, 6), torch.nan))
    assert is_empty(members.skeleton)
    assert members.skeleton.network.cache is None
    torch.testing.assert_close(members(vectors(3)), expected.expand(2, -1, -1))


def test_values_of_an_empty_buffer_do_not_reach_the_next_member():
    networks = population("cached_buffer")
    members = DeepEnsemble(networks)
    inputs = vectors(4)
    expected = torch.stack([network(inputs) for network in networks])
    torch.testing.assert_close(members(inputs), expected)
    assert members.skeleton.network.norm is None
    assert members.member(0).norm is None


def test_an_extracted_network_has_contiguous_parameters():
    """DeepEnsemble weights may lie in memory as an engine likes them; people view(-1) the weights of a network."""
    members = DeepEnsemble(population("batch_norm_2d"))
    for network in members:
        assert nn.utils.parameters_to_vector(network.parameters()).isfinite().all()
        assert all(tensor.is_contiguous() for tensor in network.state_dict().values())


def test_activations_in_attributes_are_copied_detached():
    network = ZOO["kept_activations"].make()
    network(vectors(3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(network)
    duplicate = copy_network(network)
    torch.testing.assert_close(duplicate.hidden, network.hidden.detach())
    assert duplicate.seen[0] is duplicate.hidden
    assert not duplicate.hidden.requires_grad
    assert network.hidden.requires_grad


def test_members_can_be_extracted_after_vmap():
    members = DeepEnsemble(population("kept_activations"), engine="vmap")
    members(vectors(3)).sum().backward()
    taken = copy.deepcopy(members.member(1))
    torch.testing.assert_close(taken(vectors(2)), members(vectors(2))[1])


def test_a_module_keeps_its_own_mode():
    networks = population("batch_norm_1d")
    for network in networks:
        network[2].eval()  # a frozen norm
    members = DeepEnsemble(networks)
    members(vectors(4))
    state = members.expand()
    assert members.training
    assert torch.equal(state["2.running_mean"], torch.stack([network[2].running_mean for network in networks]))
    assert not torch.equal(state["0.running_mean"], torch.stack([network[0].running_mean for network in networks]))
    assert [part.training for part in members.member(0)] == [True, True, False, True]
