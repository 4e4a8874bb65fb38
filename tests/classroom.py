"""A classroom: small pictures and tables, and models that teach and learn about them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError

CLASSES = 3


def make_cnn() -> nn.Module:
    """A convolution, a batch norm whose statistics are not what they start as, a dropout."""
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, CLASSES),
    )
    network[1].running_mean.normal_(0, 0.2)
    network[1].running_var.uniform_(0.5, 1.5)
    return network


def make_mlp(features: int = 32) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Together(Ensemble):
    """An ensemble whose members do not exist as separate networks."""

    def __init__(self) -> None:
        super().__init__([], 3)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.heads = nn.Linear(8, 3 * CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.heads(self.body(inputs)).unflatten(1, (3, CLASSES)).transpose(0, 1)

    def expand(self) -> State:
        raise EnfoldError("members do not exist as networks")

    def member(self, index: int) -> nn.Module:
        raise EnfoldError("members do not exist as networks")


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def population(make: Callable[[], nn.Module], count: int = 3, seed: int = 0) -> list[nn.Module]:
    return [seeded(make, seed + index) for index in range(count)]


def make_pictures(normalised: bool = True, count: int = 12, low: int = 0, high: int = 256) -> Data:
    """Bytes; `low` and `high` keep them from the ends, where moves would be clipped."""
    source = torch.Generator().manual_seed(0)
    part = Split(
        torch.randint(low, high, (count, 2, 4, 4), generator=source).to(torch.uint8), torch.arange(count) % CLASSES
    )
    scale = {"mean": (0.4, 0.6), "std": (0.2, 0.5)} if normalised else {}
    return Data(part, part, part, CLASSES, (2, 4, 4), **scale)


def make_table(count: int = 12) -> Data:
    """Numbers that are no pixels."""
    part = Split(3 * torch.randn(count, 5, generator=torch.Generator().manual_seed(1)), torch.arange(count) % CLASSES)
    return Data(part, part, part, CLASSES, (5,))


TEACHERS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: DeepEnsemble(population(make_cnn)),
    "mlp": lambda: DeepEnsemble(population(make_mlp)),
    "mixed": lambda: MixedEnsemble([seeded(make_cnn, 0), seeded(make_mlp, 1), seeded(make_cnn, 2)]),
    "together": lambda: seeded(Together, 0),
    "share": lambda: BatchEnsemble(seeded(make_mlp, 0), 3),
}
STUDENTS: dict[str, Callable[[], nn.Module]] = {
    "stacked": lambda: DeepEnsemble(population(make_cnn, seed=7)),
    "share": lambda: BatchEnsemble(seeded(make_cnn, 7), 3),
    "joint": lambda: BatchEnsemble(seeded(make_cnn, 7), 3, batch_norm="joint"),
    "together": lambda: seeded(Together, 7),
}
