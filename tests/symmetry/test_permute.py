"""Permuting: orders compose and are undone, soft permutations follow their closed form, and bad ones are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from known_networks import KNOWN, made, symmetry_of
from torch import Tensor, nn
from torch.func import functional_call

from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.symmetry import Axis, Group, permute, permute_state, soft, symmetries
from enfold.symmetry.permute import invert_orders


def matrix_of(order: Tensor) -> Tensor:
    return torch.eye(len(order), dtype=torch.float64)[order]


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_orders_compose_and_are_undone(first, second):
    group = Group("units", 4, (Axis("w", 1, 4, offset=1, outer=2, inner=3), Axis("b", 0, 4)))
    state = {"w": torch.arange(78.0).reshape(3, 26), "b": torch.arange(4.0)}
    one, two = torch.tensor(first), torch.tensor(second)
    both = permute_state(permute_state(state, group, one), group, two)
    torch.testing.assert_close(both, permute_state(state, group, one[two]), rtol=0, atol=0)
    back = permute_state(both, group, one[two].argsort())
    torch.testing.assert_close(back, state, rtol=0, atol=0)


@pytest.mark.parametrize("name", KNOWN)
def test_orders_of_all_groups_are_undone(name):
    network, _ = made(name)
    symmetry, state = symmetry_of(name), dict(network.state_dict())
    source = torch.Generator().manual_seed(1)  # it moves the blocks of all that have any
    orders = {group.name: torch.randperm(group.size, generator=source) for group in symmetry.groups}
    there = permute(state, symmetry, orders)
    torch.testing.assert_close(permute(there, symmetry, invert_orders(orders, symmetry)), state, rtol=0, atol=0)


def test_an_axis_by_hand():
    axis = Axis("w", 0, 2, offset=1, outer=2, inner=2)
    tensor = torch.tensor([9, 0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert axis.by_unit(tensor).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    found = permute_state({"w": tensor}, Group("units", 2, (axis,)), torch.tensor([1, 0]))
    assert found["w"].tolist() == [9, 2, 3, 0, 1, 6, 7, 4, 5, 8]
    assert tensor[1] == 0  # the state is left as it was


def test_units_within_a_range_of_another_axis():
    axis = Axis("w", 1, 2, within=((0, 1, 1),))
    tensor = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert axis.by_unit(tensor).tolist() == [[2], [3]]
    found = permute_state({"w": tensor}, Group("units", 2, (axis,)), torch.tensor([1, 0]))
    assert found["w"].tolist() == [[0, 1], [3, 2], [4, 5]]
    with pytest.raises(EnfoldError, match=r"'w' is \(1, 2\)"):
        permute_state({"w": tensor[:1]}, Group("units", 2, (axis,)), torch.tensor([1, 0]))


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("tied readout", "relative")])
def test_soft_with_a_permutation_matrix_is_hard(name):
    network, _ = made(name)
    symmetry = symmetry_of(name)
    state = network.double().state_dict()
    for group in symmetry.groups:
        order = torch.randperm(group.size, generator=torch.Generator().manual_seed(0))
        matrix = matrix_of(order)
        found = soft(state, group, matrix, matrix.mT)
        torch.testing.assert_close(found, permute_state(state, group, order), rtol=0, atol=0)
    assert symmetry.groups or name == "bare linear"


def test_soft_on_a_chain_is_its_closed_form_and_differentiable():
    network = MLP(5, [4], 3).double()
    symmetry = symmetries(network, torch.zeros(2, 5))
    noise = 0.1 * torch.rand(4, 4, dtype=torch.float64)
    matrix = (torch.eye(4, dtype=torch.float64) + noise).requires_grad_()
    inverse = torch.linalg.inv(matrix)
    found = soft(network.state_dict(), symmetry.groups[0], matrix, inverse)
    first, head = network.hidden[0], network.head
    torch.testing.assert_close(found["hidden.0.weight"], matrix @ first.weight.detach())
    torch.testing.assert_close(found["hidden.0.bias"], matrix @ first.bias.detach())
    torch.testing.assert_close(found["head.weight"], head.weight.detach() @ inverse)
    assert torch.equal(found["head.bias"], head.bias)
    inputs = torch.randn(3, 5, dtype=torch.float64)
    functional_call(network, found, inputs).sum().backward()
    assert matrix.grad.abs().min() > 0


def test_soft_preserves_a_linear_network():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)).double()
    symmetry = symmetries(network, torch.zeros(1, 2, 5, 5))
    matrix = torch.eye(4, dtype=torch.float64) + 0.1 * torch.rand(4, 4, dtype=torch.float64)
    found = soft(network.state_dict(), symmetry.groups[0], matrix, torch.linalg.inv(matrix))
    inputs = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(functional_call(network, found, inputs), network(inputs))
    assert not torch.allclose(found["0.weight"], network[0].weight)


def test_invalid_orders_are_refused():
    network = MLP(5, [4], 3)
    symmetry = symmetries(network, torch.zeros(2, 5))
    state, group = network.state_dict(), symmetry.groups[0]
    with pytest.raises(EnfoldError, match="must contain each of 0 to 3 once"):
        permute_state(state, group, torch.tensor([0, 0, 1, 2]))
    with pytest.raises(EnfoldError, match=r"got \(3,\) values"):
        permute(state, symmetry, {"hidden.0": torch.arange(3)})
    with pytest.raises(EnfoldError, match="got 'head'"):
        permute(state, symmetry, {"head": torch.arange(3)})
    with pytest.raises(EnfoldError, match=r"values of torch.float32: use"):
        permute_state(state, group, torch.arange(4.0))
    with pytest.raises(EnfoldError, match=r"'hidden.0.weight' is \(3, 5\) and axis 0 must contain 4"):
        permute_state(MLP(5, [3], 3).state_dict(), group, torch.arange(4))
    with pytest.raises(EnfoldError, match=r"must be 4 x 4, got \(3, 3\)"):
        soft(state, group, torch.eye(3), torch.eye(3))
    del state["head.weight"]
    with pytest.raises(EnfoldError, match=r"'head.weight' is missing"):
        permute_state(state, group, torch.arange(4))


def test_a_tied_tensor_has_no_soft_permutation():
    network, _ = made("tied readout")
    group = symmetry_of("tied readout").groups[0]
    with pytest.raises(EnfoldError, match=r"'embed.weight' both produces and consumes"):
        soft(network.state_dict(), group, torch.eye(4), torch.eye(4))
