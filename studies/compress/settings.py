"""The settings of the study: data, networks and how members and students are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
from studies.finetuned import merges as finetuned

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
        given: Function that returns the members of a seed, from a folder of networks; None to train them.
        all_data: Function that returns the data of a seed with all training images; None if there are no others.
    """

    title: str
    data: Callable[[int], Data]
    network: dict[str, Any]
    members: TrainConfig
    students: dict[str, Any]
    outputs: int | None = None
    stacked: bool = False
    given: Callable[[Path, int], list[nn.Module]] | None = None
    all_data: Callable[[int], Data] | None = None

    def make(self, data: Data) -> Make:
        """Return the function that makes the network; weights are stored channels-last, in which bf16 is fastest."""
        build = factory(self.network, data.shape, self.outputs or data.num_classes)

        def network() -> nn.Module:
            made = build()
            for parameter in made.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            return made

        return network


def images(name: str, train: int | None, val: int) -> Callable[[int], Data]:
    """Return a function that loads a part of a built-in data set; the part depends on the seed."""
    return lambda seed: enfold.data.load(name, train_size=train, val_size=val, seed=seed)


def friedman(seed: int) -> Data:
    """Return the first Friedman function with noise (10 features, of which 5 matter), standardized."""
    inputs, values = make_friedman1(9000, noise=1.0, random_state=seed)
    inputs, values = (inputs - inputs[:2000].mean(0)) / inputs[:2000].std(0), values - values[:2000].mean()
    values = values / values[:2000].std()
    rows = np.split(np.arange(9000), (2000, 4000))
    return as_data(*((inputs[part].astype("float32"), values[part].astype("float32")) for part in rows))


def second_half(seed: int) -> Data:
    """Return five classes of fashion-mini, on which members are fine-tuned."""
    return finetuned.half(enfold.data.load("fashion-mini"), finetuned.TARGET, finetuned.EXAMPLES)


def tuned_members(folder: Path, seed: int) -> list[nn.Module]:
    """Return the members of the study of merges, which are fine-tuned from one network."""
    base = finetuned.make_base(folder, seed, enfold.data.load("fashion-mini"))
    return finetuned.make_members(folder, seed, "small", base, second_half(seed))


SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 5e-4, "precision": "bfloat16", "select": "last"}
GAUSSIAN = Regression(head="gaussian", variance="softplus")

SETTINGS: dict[str, Setting] = {
    "mlp": Setting(
        "MLP (784-256-256-10) on Fashion-MNIST, 10,000 images",
        images("fashion-mnist", 10_000, 2000),
        {"name": "mlp", "widths": [256, 256]},
        TrainConfig(epochs=50, batch_size=128, lr=1e-3, select="last"),
        {"lr": 1e-3},
        stacked=True,
        all_data=images("fashion-mnist", None, 2000),
    ),
    "friedman": Setting(
        "MLP (10-64-64) with a Gaussian head on the Friedman function, 2,000 rows",
        friedman,
        {"name": "mlp", "widths": [64, 64]},
        TrainConfig(epochs=60, batch_size=50, lr=2e-3, select="last", task=GAUSSIAN),
        {"lr": 2e-3},
        outputs=2,
        stacked=True,
    ),
    "resnet": Setting(
        "Residual network (0.3 million parameters) on CIFAR-10, 2,000 images, flips",
        images("cifar10", 2000, 1000),
        {"name": "resnet", "depth": 8, "width": 32, "stem_stride": 2},
        TrainConfig(epochs=25, batch_size=64, lr=0.1, augment=("flip",), **SGD),
        {"lr": 0.1},
    ),
    "finetuned": Setting(
        "Residual network, fine-tuned from one network on half of fashion-mini, 2,000 images",
        second_half,
        finetuned.NETWORK,
        finetuned.TUNING.replace(lr=1e-3, select="last"),
        {"lr": 1e-3},
        given=tuned_members,
    ),
    "cnn": Setting(
        "CNN (8-16-32) on fashion-mini, 1,500 images: the demo",
        images("fashion-mini", 1500, 1000),
        {"name": "small-cnn", "channels": [8, 16, 32], "dropout": 0.0},
        TrainConfig(epochs=20, batch_size=64, lr=5e-3, select="last"),
        {"lr": 5e-3},
        stacked=True,
        all_data=images("fashion-mini", None, 1000),
    ),
}
