"""Tiny data and trained members, for distillation and merges."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig, fit


class Normed(nn.Module):
    """A network with a batch norm, a dropout and an integer buffer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, 3)
        self.register_buffer("version", torch.tensor(7))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(torch.relu(self.norm(self.inner(inputs)))))


class Plain(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(inputs)))


NETWORKS: dict[str, Callable[..., nn.Module]] = {"plain": Plain, "normed": Normed}


@pytest.fixture
def networks() -> dict[str, Callable[..., nn.Module]]:
    """Network classes by name."""
    return NETWORKS


def make_data() -> Data:
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> Split:
        labels = torch.randint(3, (count,), generator=generator)
        return Split(torch.eye(4)[labels] + 0.6 * torch.randn(count, 4, generator=generator), labels)

    return Data(part(40), part(30), part(30), 3, (4,))


@cache
def trained(kind: str) -> DeepEnsemble:
    members = DeepEnsemble(NETWORKS[kind], 4, seed=2)
    fit(members, make_data(), config=TrainConfig(epochs=4, batch_size=16, lr=0.03), quiet=True)
    return members


@pytest.fixture
def data() -> Data:
    """Forty noisy points in three classes."""
    return make_data()


@pytest.fixture
def members(request: pytest.FixtureRequest) -> DeepEnsemble:
    """Four trained members in train mode, which must not be changed; with "plain" layers on request."""
    return trained(getattr(request, "param", "normed"))[:].train()


@pytest.fixture
def snapshot() -> Callable[[nn.Module], Callable[[], bool]]:
    """Record a model; the returned function checks that it is unchanged bit for bit, with the same mode."""

    def remember(model: nn.Module) -> Callable[[], bool]:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        modes = [part.training for part in model.modules()]
        gradients = [parameter.grad for parameter in model.parameters()]

        def unchanged() -> bool:
            now = model.state_dict()
            same = now.keys() == before.keys() and all(torch.equal(before[name], now[name]) for name in now)
            kept = all(one is other.grad for one, other in zip(gradients, model.parameters(), strict=True))
            return same and kept and modes == [part.training for part in model.modules()]

        return unchanged

    return remember
