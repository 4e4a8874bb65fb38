"""Networks are called as their forward pass takes the inputs."""

import pytest
import torch
from torch import Tensor, nn

from enfold import DeepEnsemble, EnfoldError
from enfold.engines.call import call_network, unwrap_inputs
from enfold.engines.stacked import StackedProgram


class Two(nn.Module):
    def forward(self, first: Tensor, second: Tensor | None) -> Tensor:
        return first if second is None else first + second


class Graph:
    y = torch.zeros(1)


ONE = torch.ones(2, 3)


@pytest.mark.parametrize("inputs", [(ONE, None), [ONE, None], {"first": ONE, "second": None}])
def test_none_is_passed_to_a_network_that_takes_it(inputs):
    assert torch.equal(call_network(Two(), inputs), ONE)


def test_none_of_another_name_is_left_out():
    assert torch.equal(call_network(Two(), {"first": ONE, "second": ONE, "third": None}), 2 * ONE)
    assert torch.equal(call_network(nn.Identity(), {"first": ONE, "third": None}), ONE)


@pytest.mark.parametrize("inputs", [ONE, Graph()], ids=["tensor", "object"])
def test_missing_inputs_are_named(inputs):
    with pytest.raises(EnfoldError, match=r"the 2 inputs of Two.forward\(first, second\).*unpack="):
        call_network(Two(), inputs)


def test_errors_of_a_network_with_one_input_are_its_own():
    class Wrong(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + "text"

    with pytest.raises(TypeError, match="unsupported operand"):
        call_network(Wrong(), ONE)


def test_a_dictionary_of_one_tensor_runs_as_the_tensor():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, pixels: Tensor) -> Tensor:
            return self.layers(pixels)

    ensemble = DeepEnsemble(Named, 2)
    expected = torch.stack([network(ONE) for network in ensemble.networks()])
    torch.testing.assert_close(ensemble({"pixels": ONE}), expected)
    assert isinstance(ensemble.choose_engine({"pixels": ONE}), StackedProgram)
    for outputs in (ensemble(ONE), ensemble(pixels=ONE)):
        torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(
    "inputs", [{"second": ONE}, {"first": ONE, "second": None}, {"first": [ONE]}, (ONE, ONE), [ONE]]
)
def test_other_inputs_are_not_unwrapped(inputs):
    network = Two() if not isinstance(inputs, list) else nn.Identity()
    assert unwrap_inputs(network, inputs) is inputs
