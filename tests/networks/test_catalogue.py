"""Networks by name, by mapping and by reference to the user's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from enfold.errors import EnfoldError
from enfold.networks import MLP, NETWORKS, MediumCNN, ResNet, SmallCNN, ViT, WideResNet, factory, make

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"widths": [8]},
    "small-cnn": {"channels": [2, 3]},
    "medium-cnn": {"channels": [2, 2, 2, 2]},
    "resnet": {"depth": 8, "width": 4, "stem_stride": 2},
    "resnet20": {"depth": 8, "width": 4},
    "resnet50": {"blocks": [1, 1], "width": 2},
    "fast-resnet": {"stem": 2, "widths": [3, 4]},
    "wide-resnet": {"depth": 10, "widen_factor": 1},
    "vit": {"width": 8, "depth": 1, "heads": 2},
}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 8, 12)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_fits_the_data(name: str, shape: tuple[int, ...]) -> None:
    network = make({"name": name, **SMALL[name]}, shape, 7)
    assert network(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mlp", MLP),
        ("small-cnn", SmallCNN),
        ("medium-cnn", MediumCNN),
        ("resnet20", ResNet),
        ("wide-resnet", WideResNet),
        ("vit", ViT),
        ("wrn-28-10", WideResNet),
        ("wide-resnet-16-4", WideResNet),
    ],
)
def test_names(name: str, kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        assert type(make(name, (3, 32, 32), 10)) is kind


def test_wrn_names_contain_depth_and_widen_factor() -> None:
    with torch.device("meta"):
        network = make({"name": "wrn-28-5", "dropout": 0.3}, (3, 32, 32), 100)
    assert sum(parameter.numel() for parameter in network.parameters()) == 9_161_524
    assert {module.p for module in network.modules() if isinstance(module, nn.Dropout)} == {0.3}


def test_mlp_accepts_data_of_any_shape() -> None:
    assert make("mlp", (20,), 3)(torch.zeros(2, 20)).shape == (2, 3)


def test_a_factory_gives_new_weights_and_preserves_the_spec() -> None:
    spec = {"name": "mlp", "widths": [4]}
    new = factory(spec, (5,), 2)
    first, second = new(), new()
    assert first is not second
    assert not torch.equal(first.head.weight, second.head.weight)
    assert spec == {"name": "mlp", "widths": [4]}


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("mpl", (4,), r"no network 'mpl' \(did you mean 'mlp'\?\)"),
        ("inception", (4,), "no network 'inception': choose one of mlp"),
        ({"widths": [4]}, (4,), "must have a name"),
        ({"name": "mlp", "width": [4]}, (4,), r"no argument 'width' \(did you mean 'widths'\?\)"),
        ({"name": "vit", "zzz": 1}, (3, 8, 8), "no argument 'zzz': choose from patch, width"),
        ({"name": "mlp", "num_classes": 4}, (4,), "num_classes"),
        ({"name": "mlp", "widths": "64"}, (4,), "widths must be a list"),
        ({"name": "wrn-28-10", "depth": 16}, (3, 32, 32), "depth"),
        ("wrn-27-10", (3, 32, 32), "must be 6n \\+ 4, got 27"),
        ("resnet20", (784,), r"data_shape .*\(784,\)"),
        ("mlp", (), "data_shape"),
        ("mlp", (0,), "data_shape"),
    ],
)
def test_invalid_specs_are_one_sentence(spec: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(EnfoldError, match=message) as caught:
        make(spec, shape, 10)
    assert "\n" not in str(caught.value)


OWN = """
from torch import nn

def plain():
    return nn.Linear(4, 2)

def fitted(shape, num_classes):
    return nn.Linear(shape[0], num_classes)

def with_arguments(num_classes, bias=True, **others):
    return nn.Linear(9, num_classes, bias=bias)

def needy(width):
    return nn.Linear(width, 2)

def wrong():
    return "network"

class Net(nn.Linear):
    def __init__(self, num_classes=3):
        super().__init__(5, num_classes)

instance = nn.Linear(4, 2)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_networks.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("plain", {}, (2, 4)),
        ("fitted", {}, (7, 6)),
        ("with_arguments", {"bias": False}, (7, 9)),
        ("Net", {}, (7, 5)),
        ("Net", {"num_classes": 4}, (4, 5)),
    ],
)
def test_user_networks(own: str, name: str, arguments: dict[str, Any], shape: tuple[int, int]) -> None:
    network = make({"name": f"{own}:{name}", **arguments}, (6,), 7)
    assert isinstance(network, nn.Linear)
    assert network.weight.shape == shape
    assert (network.bias is None) == (name == "with_arguments")


def test_user_network_by_module() -> None:
    assert type(make("torch.nn:Identity", (6,), 7)) is nn.Identity


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("needy", {}, "missing a required argument: 'width'"),
        ("plain", {"width": 3}, "has no argument 'width': it takes none"),
        ("wrong", {}, "must return a torch.nn.Module, got str"),
        ("instance", {}, "instance.*got Linear"),
    ],
)
def test_invalid_user_networks(own: str, name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnfoldError, match=message):
        make({"name": f"{own}:{name}", **arguments}, (6,), 7)
