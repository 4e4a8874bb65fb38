"""Networks that differ in more than parameters and buffers, and a small data set."""

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn

from enfold import (
    Data,
    Split,
)
from zoo import vectors


class Net(nn.Module):
    """Two layers with any module between them."""

    def __init__(self, seed, between, **attributes):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            for name, value in attributes.items():
                setattr(self, name, value() if callable(value) and not isinstance(value, nn.Module) else value)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def same_name(activation):
    """A class of one name in a module of its own."""
    module = types.ModuleType(f"net_{activation}")
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)\n"
        f"    def forward(self, x):\n        return self.last(torch.{activation}(self.first(x)))\n"
    )
    exec(code, vars(module))  # noqa: S102
    return module.Net()


def attribute(values, between):
    networks = [Net(seed, between) for seed in range(len(values))]
    for network, value in zip(networks, values, strict=True):
        network.value = value
    return networks


def masks(seed):
    return torch.rand(8, generator=torch.Generator().manual_seed(seed)) + 0.5


def hidden_layer(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(8, 8)


DIFFERENT = {
    "an activation function": lambda: attribute([torch.relu, torch.tanh], lambda net, x: net.value(x)),
    "a float": lambda: attribute([0.01, 0.9], lambda net, x: F.leaky_relu(x, net.value)),
    "a flag": lambda: attribute([True, False], lambda net, x: x.relu() if net.value else x),
    "a dictionary": lambda: attribute([{"p": 1.0}, {"p": 3.0}], lambda net, x: x.relu() * net.value["p"]),
    "a list of columns": lambda: attribute([[0, 1, 2, 3] * 2, [7, 6, 5, 4] * 2], lambda net, x: x.relu()[:, net.value]),
    "a partial": lambda: attribute(
        [functools.partial(F.leaky_relu, negative_slope=s) for s in (0.0, 0.8)], lambda net, x: net.value(x)
    ),
    "a plain tensor": lambda: attribute([masks(0), masks(1)], lambda net, x: x.relu() * net.value),
    "tensors in a list": lambda: attribute([[masks(0)], [masks(1)]], lambda net, x: x.relu() * net.value[0]),
    "layers in a list": lambda: attribute(
        [[hidden_layer(0)], [hidden_layer(1)]], lambda net, x: net.value[0](x.relu()).relu()
    ),
    "classes of one name": lambda: [same_name("relu"), same_name("tanh")],
    "a rate of dropout in train mode": lambda: attribute(
        [0.1, 0.9], lambda net, x: F.dropout(x.relu(), net.value, net.training)
    ),
}


def blobs():
    x, y = vectors(24), torch.arange(24) % 3
    return Data(Split(x, y), Split(x[:8], y[:8]), Split(x[8:16], y[8:16]), num_classes=3, shape=(6,))
