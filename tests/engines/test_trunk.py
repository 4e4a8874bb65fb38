"""One pass over a shared trunk: how often its modules run, and that this changes no number."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.ensembles.tree_net import TreeNet
from specimens import Apply
from zoo import ZOO


class Calls(Counter):
    """Counts that are shared by the copies of a network."""

    def __deepcopy__(self, memo):
        return self


class Counting(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self, name: str, calls: Calls, *sizes: int) -> None:
        super().__init__(*sizes)
        self.name, self.calls = name, calls

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls[self.name] += 1
        return super().forward(inputs)


def counted(function, **sizes):
    """A network of counting layers and `forward(x) = function(self, x)`."""
    calls = Calls()
    layers = {name: Counting(name, calls, *size) for name, size in sizes.items()}
    return Apply(function, **layers), calls


def chain(net, x):
    return net.third(torch.relu(net.second(torch.relu(net.first(x)))))


def warmed(members, inputs):
    """The first call chooses an engine, and runs a few examples for it."""
    members(inputs)
    return members


def alone(members, inputs):
    return torch.stack([member(inputs) for member in members])


def test_the_trunk_runs_once_and_only_before_the_split():
    network, calls = counted(chain, first=(4, 5), second=(5, 5), third=(5, 3))
    inputs = torch.randn(7, 4)
    members = warmed(TreeNet(network, 3, split="third"), inputs)
    calls.clear()
    outputs = members(inputs)
    assert calls == {"first": 1, "second": 1, "third": 3}
    calls.clear()
    with torch.inference_mode():
        torch.testing.assert_close(members(inputs), outputs)
    assert calls == {"first": 1, "second": 1, "third": 3}
    calls.clear()
    members.forward_each(inputs.expand(3, 7, 4))
    assert calls == {"first": 3, "second": 3, "third": 3}
    warmed(members.set_engine("loop"), inputs)
    calls.clear()
    torch.testing.assert_close(members(inputs), outputs)
    assert calls == {"first": 3, "second": 3, "third": 3}


def test_a_shared_module_that_is_called_again_after_the_split_runs_for_every_member():
    def there_and_back(net, x):
        return net.shared(torch.tanh(net.own(torch.tanh(net.shared(net.shared(x))))))

    network, calls = counted(there_and_back, shared=(4, 4), own=(4, 4))
    inputs = torch.randn(7, 4)
    members = warmed(TreeNet(network, 3, branch=("own",)), inputs)
    calls.clear()
    outputs = members(inputs)
    assert calls == {"shared": 2 + 3, "own": 3}
    torch.testing.assert_close(outputs, alone(members, inputs))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_an_owned_tensor_that_another_module_uses_ends_the_trunk(noise):
    """Also where members are equal, so that only the gradient tells whose tensor was used."""

    def functional(net, x):
        return net.last(torch.tanh(F.linear(net.first(x), net.own.weight)))

    network, calls = counted(functional, first=(4, 4), own=(4, 4), last=(4, 3))
    inputs = torch.randn(7, 4)
    members = warmed(TreeNet(network, 3, branch=(r"own\.weight",), branches="copies", noise=noise), inputs)
    calls.clear()
    members(inputs).square().sum().backward()
    assert calls == {"first": 1, "last": 3}
    found = members.own.get_parameter("own.weight").grad
    members.zero_grad()
    members.set_engine("loop")(inputs).square().sum().backward()
    torch.testing.assert_close(found, members.own.get_parameter("own.weight").grad)
    assert (found.flatten(1).norm(dim=1) > 0).all()


def test_control_flow_that_cannot_be_traced():
    def data_dependent(net, x):
        hidden = net.first(x)
        for _ in range(int(hidden.abs().sum()) % 3 + 1):
            hidden = torch.tanh(net.second(hidden))
        return net.third(hidden) if hidden.mean() > 0 else -net.third(hidden)

    network, calls = counted(data_dependent, first=(4, 5), second=(5, 5), third=(5, 3))
    members = TreeNet(network, 3, split="third").eval()
    for seed in range(6):
        inputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))
        warmed(members, inputs)
        calls.clear()
        outputs = members(inputs)
        assert calls["first"] == 1
        assert calls["second"] <= 3
        assert calls["third"] == 3
        torch.testing.assert_close(outputs, alone(members, inputs))


def test_another_control_flow_runs_separately():
    """Stochastic depth draws for each member which blocks it runs."""

    def stochastic(net, x):
        if torch.rand(()) < 0.5:
            x = x + net.block(x)
        if torch.rand(()) < 0.5:
            x = x + net.own(x)
        return net.last(x)

    network = Apply(stochastic, block=nn.Linear(4, 4), own=nn.Linear(4, 4), last=nn.Linear(4, 3))
    members, inputs = TreeNet(network, 4, branch=("own",)), torch.randn(5, 4)
    for seed in range(10):
        torch.manual_seed(seed)
        outputs = members(inputs)
        torch.manual_seed(seed)
        torch.testing.assert_close(outputs, alone(members, inputs))


def in_place(net, x):
    x = net.first(x)
    x += 1
    x = net.relu(net.second(x))
    x.mul_(2)
    return net.third(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_that_are_altered_in_place_are_altered_once_a_member(mode):
    network, calls = counted(in_place, first=(4, 5), second=(5, 5), third=(5, 3))
    network.relu = nn.ReLU(inplace=True)
    members, inputs = TreeNet(network, 3, branch=("third",)), torch.randn(7, 4)
    with mode():
        expected = alone(members, inputs)
        warmed(members, inputs)
        for _ in range(3):
            calls.clear()
            torch.testing.assert_close(members(inputs), expected)
            assert calls == {"first": 1, "second": 1, "third": 3}


def test_parts_of_a_shared_module_run_once_too():
    network, calls = counted(lambda net, x: net.head(net.body(x)), head=(5, 3))
    network.body = nn.Sequential(
        Counting("inner", calls, 4, 5), nn.ReLU(), nn.Sequential(Counting("inner", calls, 5, 5))
    )
    inputs = torch.randn(7, 4)
    members = warmed(TreeNet(network, 3, branch=("head",)), inputs)
    calls.clear()
    torch.testing.assert_close(members(inputs), alone(members, inputs))
    assert calls == {"inner": 2 + 3 * 2, "head": 3 + 3}  # those of the members run alone are the second summands


def test_a_trunk_may_return_more_than_a_tensor_and_containers_may_be_changed():
    class Twice(nn.Linear):
        def forward(self, x):
            return {"features": [super().forward(x), x], "count": 2}

    def forward(net, x):
        found = net.trunk(x)
        found["features"].append(found["features"][0] * found["count"])
        return net.head(sum(found["features"]))

    members, inputs = (
        TreeNet(Apply(forward, trunk=Twice(4, 4), head=nn.Linear(4, 3)), 3, split="head"),
        torch.randn(7, 4),
    )
    for _ in range(2):
        torch.testing.assert_close(members(inputs), alone(members, inputs))


@pytest.mark.parametrize("name", sorted(name for name, specimen in ZOO.items() if name != "tied"))
def test_outputs_and_gradients_of_the_zoo_are_the_loops(name):
    torch.manual_seed(0)
    network, inputs = ZOO[name].make(), ZOO[name].inputs(6)
    members = TreeNet(network, 3).eval()
    looped = copy.deepcopy(members).set_engine("loop")
    found, expected = members(inputs), looped(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(members.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_batch_norm_and_dropout_of_the_trunk_run_once_a_step():
    network = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    members, inputs = TreeNet(network, 3, split="3", branches="copies", noise=0.0).train(), torch.randn(8, 4)
    outputs = members(inputs)
    trunk, branch = members.shared.state(), members.own.state()
    assert trunk["1.num_batches_tracked"] == 1
    torch.testing.assert_close(trunk["1.running_mean"], 0.1 * network[0](inputs).mean(0))
    assert branch["4.num_batches_tracked"].tolist() == [1, 1, 1]
    torch.testing.assert_close(outputs[0], outputs[1])  # equal branches on one draw of the dropout
    again = members(inputs)
    assert not torch.equal(again[0], outputs[0])


def test_the_network_is_as_before_after_an_error():
    def fails(net, x):
        hidden = net.first(x)
        if len(x) == 1:
            raise RuntimeError("one example")
        return net.head(hidden)

    members = TreeNet(Apply(fails, first=nn.Linear(4, 4), head=nn.Linear(4, 3)), 2, split="head")
    inputs = torch.randn(5, 4)
    expected = members(inputs)
    with pytest.raises(RuntimeError, match="one example"):
        members(inputs[:1])
    parts = members.skeleton.network.modules()
    assert not any("forward" in vars(part) for part in parts)
    assert all(type(part._parameters) is type(nn.Module()._parameters) for part in members.skeleton.network.modules())
    torch.testing.assert_close(members(inputs), expected)
    torch.testing.assert_close(copy.deepcopy(members)(inputs), expected)
