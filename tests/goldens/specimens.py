"""Three small networks in plain PyTorch, and inputs drawn by NumPy, whose streams do not depend on PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SHAPE = 4, (2, 8, 8)
MEAN, STD = (0.45, 0.55), (0.25, 0.3)


class MLP(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 12)
        self.second = nn.Linear(12, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


class CNN(nn.Module):
    """Two convolutions with batch norm and a residual connection around a third."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        x = torch.relu(x + self.norm3(self.conv3(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Four patches, one block, mean token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, width, 4, stride=4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 4, width))
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.norm3, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "cnn": CNN, "vit": ViT}


def draws(seed: int) -> np.random.Generator:
    """Return a generator whose stream is the same with every version of PyTorch."""
    return np.random.Generator(np.random.Philox(seed))


def network(kind: str, seed: int = 0) -> nn.Module:
    """Make a network whose weights are drawn by NumPy; batch-norm statistics are not those they start with."""
    source, made = draws(seed), NETWORKS[kind]()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if not tensor.is_floating_point():
                continue
            values = torch.from_numpy(source.standard_normal(tuple(tensor.shape))).float()
            if tensor.ndim > 1:
                tensor.copy_(values / (3 * tensor[0].numel()) ** 0.5)  # as PyTorch's layers draw
            elif name.startswith("norm") and name.endswith(("weight", "running_var")):
                tensor.copy_(1 + 0.2 * values.clamp(-2, 2))
            else:
                tensor.copy_(0.1 * values)
    return made


def pixels(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images of bytes with a pattern for each class, and labels in which every class occurs."""
    source = draws(seed)
    labels = torch.from_numpy(source.permutation(np.arange(count) % CLASSES))
    patterns = torch.from_numpy(draws(99).standard_normal((CLASSES, *SHAPE)))
    noise = torch.from_numpy(source.standard_normal((count, *SHAPE)))
    return (127 + 30 * patterns[labels] + 45 * noise).clamp(0, 255).to(torch.uint8), labels


def inputs(count: int = 6, seed: int = 7) -> Tensor:
    """Draw inputs as a network sees them."""
    images = pixels(count, seed)[0].float() / 255
    return (images - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


def logits(members: int = 4, examples: int = 200, classes: int = 5, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Draw float64 logits (M, N, C) that are right more often than chance, and labels."""
    source = draws(seed)
    labels = torch.from_numpy(source.integers(classes, size=examples))
    common = source.standard_normal((1, examples, classes))
    found = torch.from_numpy(common + source.standard_normal((members, examples, classes)))
    return found + 1.5 * torch.nn.functional.one_hot(labels, classes), labels
