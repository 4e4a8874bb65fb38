"""Problems for tests of every task: networks of two inputs x and z, their data, batches and losses in plain PyTorch."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from enfold.symmetry import permute
from enfold.tasks import Regression

IGNORED = -100
SIZE = 6  # examples in a batch
WIDTH = 8


class Vector(nn.Module):
    """(B, 5) and (B, 4) -> (B, outputs)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(5, WIDTH), nn.Linear(4, WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.norm: nn.Module = nn.Identity()

    def body(self, x, z):
        hidden = torch.relu(self.first(x) + self.other(z))
        return self.head(torch.relu(self.norm(self.middle(hidden))))


class Dense(nn.Module):
    """(B, 3, 4, 4) and (B, 2, 4, 4) -> (B, outputs, 4, 4)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.other = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(2, WIDTH, 1)
        self.middle, self.head = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, outputs, 1)
        self.norm: nn.Module = nn.Identity()

    body = Vector.body


class Tokens(nn.Module):
    """Indices (B, T) and a mask (B, T) -> (B, T, outputs)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.norm: nn.Module = nn.Identity()

    def body(self, x, z):
        hidden = self.words(x) * z[..., None]
        context = hidden.sum(1, keepdim=True) / z.sum(1)[:, None, None]
        return self.head(torch.relu(self.norm(self.middle(torch.relu(self.first(hidden + context))))))


def taking(body: type[nn.Module], structure: str) -> type[nn.Module]:
    """A network that takes its inputs as a loader of this structure yields them."""

    class TakesTwo(body):
        def forward(self, x, z):
            return self.body(x, z)

    class TakesObject(body):
        def forward(self, batch):
            return self.body(batch.x, batch.z)

    return TakesObject if structure == "object" else TakesTwo


@dataclass(frozen=True)
class Problem:
    body: type[nn.Module]
    outputs: int
    task: object  # for fit; None is inferred
    loss: object  # (outputs, targets) -> scalar

    def network(self, structure: str = "dict", seed: int = 0, *, norm: bool = False) -> nn.Module:
        torch.manual_seed(seed)
        network = taking(self.body, structure)(self.outputs)
        if norm:
            network.norm = nn.BatchNorm2d(WIDTH) if self.body is Dense else nn.LayerNorm(WIDTH)
        return network


def gaussian_nll(outputs, targets):
    return F.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp(), full=True, eps=1e-6)


PROBLEMS = {
    "classes": Problem(Vector, 3, None, F.cross_entropy),
    "dense": Problem(Dense, 3, None, F.cross_entropy),
    "tokens": Problem(Tokens, 3, None, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())),
    "binary": Problem(Vector, 1, None, lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float())),
    "multilabel": Problem(Vector, 3, "multilabel", lambda out, y: F.binary_cross_entropy_with_logits(out, y.float())),
    "point": Problem(Vector, 1, "regression", lambda out, y: F.mse_loss(out[:, 0], y)),
    "gaussian": Problem(Vector, 2, Regression(head="gaussian", variance="log"), gaussian_nll),
}


def examples(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, z and y of one batch."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=draw)

    if name == "dense":
        y = integers(3, SIZE, 4, 4)
        y[0, :2] = IGNORED
        return normal(SIZE, 3, 4, 4), normal(SIZE, 2, 4, 4), y
    if name == "tokens":
        length = 4 + seed % 2  # batches are padded to different lengths
        mask = (torch.arange(length) < torch.randint(2, length + 1, (SIZE, 1), generator=draw)).float()
        y = integers(3, SIZE, length).masked_fill(mask == 0, IGNORED)
        return integers(11, SIZE, length), mask, y
    x, z = normal(SIZE, 5), normal(SIZE, 4)
    targets = {
        "classes": integers(3, SIZE),
        "binary": torch.arange(SIZE) % 2,
        "multilabel": integers(2, SIZE, 3).float(),
        "point": x[:, 0] - z[:, 1],
        "gaussian": x[:, 0] - z[:, 1],
    }
    return x, z, targets[name]


Named = namedtuple("Named", ["x", "z", "label"])


@dataclass
class Record:
    x: torch.Tensor
    z: torch.Tensor
    target: torch.Tensor


class Graph:
    """An object that is the input itself, with its target as `y`."""

    def __init__(self, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.z, self.y = x, z, y


STRUCTURES = {
    "tuple": lambda x, z, y: ((x, z), y),
    "two": lambda x, z, y: (x, z, y),
    "dict": lambda x, z, y: {"x": x, "z": z, "labels": y},
    "named": Named,
    "record": Record,
    "object": Graph,
}


def loader(name: str, structure: str = "dict", seeds: tuple[int, ...] = (1, 2)) -> list[object]:
    return [STRUCTURES[structure](*examples(name, seed)) for seed in seeds]


every_task = pytest.mark.parametrize("name", PROBLEMS)


PLAIN = {
    "optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "schedule": "constant",
    "quiet": True,
}  # fmt: skip


def outputs_of(network: nn.Module, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Call a network of this file with its inputs."""
    return network.body(x, z)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=tolerance)


def shuffled(network: nn.Module, symmetry) -> nn.Module:
    draw = torch.Generator().manual_seed(5)
    orders = {group.name: torch.randperm(group.size, generator=draw) for group in symmetry.groups}
    twin = copy.deepcopy(network)
    twin.load_state_dict(permute(dict(network.state_dict()), symmetry, orders))
    return twin


NUMBERS = ("point", "gaussian")
