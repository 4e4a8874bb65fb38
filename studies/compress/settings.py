"""The settings of the study: data, networks and how members and students are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_friedman1
from torch import nn

import enfold
from enfold.data import Data
from enfold.data.convert import as_data
from enfold.networks.catalogue import factory
from enfold.tasks import Regression
from enfold.train import TrainConfig

MEMBERS = 4
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        title: What it is.
        data: Function that returns the data of a seed.
        network: The network, as a specification of the catalogue.
        members: Settings of the members' training.
        students: What differs for students and controls, which start from a member.
        outputs: Number of outputs if the data have no classes.
        stacked: Whether members are trained together, which is faster for small networks.
    """

    title: str
    data: Callable[[int], Data]
    network: dict[str, Any]
    members: TrainConfig
    students: dict[str, Any]
    outputs: int | None = None
    stacked: bool = False

    def make(self, data: Data) -> Make:
        """Return the function that makes the network; weights are stored channels-last, in which bf16 is fastest."""
        build = factory(self.network, data.shape, self.outputs or data.num_classes)

        def network() -> nn.Module:
            made = build()
            return made.to(memory_format=torch.channels_last) if "widths" not in self.network else made  # type: ignore[call-overload,no-any-return]

        return network


def images(name: str, train: int, val: int) -> Callable[[int], Data]:
    """Return a function that loads a part of a built-in data set; the part depends on the seed."""
    return lambda seed: enfold.data.load(name, train_size=train, val_size=val, seed=seed)


def friedman(seed: int) -> Data:
    """Return the first Friedman function with noise (10 features, of which 5 matter), standardized."""
    inputs, values = make_friedman1(8000, noise=1.0, random_state=seed)
    inputs, values = (inputs - inputs[:1000].mean(0)) / inputs[:1000].std(0), values - values[:1000].mean()
    values = values / values[:1000].std()
    parts = [(inputs[part].astype("float32"), values[part].astype("float32")) for part in np.split(np.arange(8000), (1000, 3000))]
    return as_data(*parts)


SGD: dict[str, Any] = {"optimizer": "sgd", "nesterov": True, "weight_decay": 5e-4, "precision": "bfloat16", "select": "last"}
CROPS = ("pad-crop", "flip")

SETTINGS: dict[str, Setting] = {
    "mlp": Setting(
        "MLP (784-128-128-10) on Fashion-MNIST, 5,000 images",
        images("fashion-mnist", 5000, 2000),
        {"name": "mlp", "widths": [128, 128]},
        TrainConfig(epochs=40, batch_size=128, lr=1e-3, select="last"),
        {"lr": 1e-3},
        stacked=True,
    ),
    "cnn": Setting(
        "CNN (16-32-64) on Fashion-MNIST, 2,000 images, shifts and flips",
        images("fashion-mnist", 2000, 2000),
        {"name": "small-cnn", "channels": [16, 32, 64], "dropout": 0.0},
        TrainConfig(epochs=60, batch_size=64, lr=0.05, augment=CROPS, **SGD),
        {"lr": 0.05},
    ),
    "friedman": Setting(
        "MLP (10-64-64) with a Gaussian head on the Friedman function, 1,000 rows",
        friedman,
        {"name": "mlp", "widths": [64, 64]},
        TrainConfig(epochs=200, batch_size=50, lr=1e-3, select="last", task=Regression(head="gaussian", variance="softplus")),
        {"lr": 1e-3},
        outputs=2,
        stacked=True,
    ),
    "resnet": Setting(
        "Residual network (0.3 million parameters) on CIFAR-10, 2,000 images, shifts and flips",
        images("cifar10", 2000, 1000),
        {"name": "resnet", "depth": 8, "width": 32, "stem_stride": 2},
        TrainConfig(epochs=40, batch_size=64, lr=0.1, augment=CROPS, **SGD),
        {"lr": 0.1},
    ),
}
