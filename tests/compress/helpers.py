"""Small members and examples of the tests of compress."""

import torch
from torch import nn

SETTINGS = {"epochs": 4, "lr": 5e-3, "batch_size": 32, "quiet": True}


def examples(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (N, 6) and noisy labels of two classes."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 6, generator=source)
    noise = 0.7 * torch.randn(number, generator=source)
    return inputs, ((inputs[:, 0] * inputs[:, 1] + inputs[:, 2] + noise) > 0).long()


TRAIN, VAL = examples(0, 160), examples(1, 300)


def make(width: int = 24) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))
