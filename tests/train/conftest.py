"""Tiny data and networks that train in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from enfold.data import Data, Split


class Convolutional(nn.Module):
    """A convolution, a batch norm and a head: what a residual network is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)
    )


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "normed": normed,
    "dropping": dropping,
    "convolutional": Convolutional,
}


@pytest.fixture
def make() -> dict[str, Callable[[], nn.Module]]:
    """Network factories by name."""
    return MAKERS


def points(count: int, generator: torch.Generator) -> Split:
    labels = torch.randint(4, (count,), generator=generator)
    return Split(torch.eye(8)[labels] + 0.5 * torch.randn(count, 8, generator=generator), labels)


@pytest.fixture
def data() -> Data:
    """Fifty noisy points in four classes: with batches of 16 the last one has two."""
    generator = torch.Generator().manual_seed(0)
    return Data(points(50, generator), points(30, generator), points(30, generator), 4, (8,))


@pytest.fixture
def images() -> Data:
    """Forty pictures of 6 x 6 pixels, whose class is the brightness of their left half."""
    generator = torch.Generator().manual_seed(1)

    def part(count: int) -> Split:
        labels = torch.randint(4, (count,), generator=generator)
        pixels = torch.randint(0, 100, (count, 1, 6, 6), generator=generator)
        pixels[..., :3] += 50 * labels[:, None, None, None]
        return Split(pixels.to(torch.uint8), labels)

    return Data(part(40), part(20), part(20), 4, (1, 6, 6), mean=(0.4,), std=(0.3,))


@pytest.fixture
def double(data: Data) -> Data:
    """The points in double precision."""

    def part(split: Split) -> Split:
        return Split(split.inputs.double(), split.labels)

    return data.replace(train=part(data.train), val=part(data.val), test=part(data.test))
