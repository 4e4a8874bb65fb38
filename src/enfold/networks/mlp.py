"""MLP: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import fraction, whole, whole_list


class MLP(nn.Module):
    """in_features -> widths -> num_classes for inputs of any shape, which are flattened.

    Each hidden layer is linear, ReLU, dropout; no widths make a linear classifier. Weights start as PyTorch
    starts them. The defaults make 784-512-256-128-10 with 567,434 parameters.
    """

    def __init__(
        self,
        in_features: int = 784,
        widths: Sequence[int] = (512, 256, 128),
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        widths = whole_list("widths", widths)
        whole(in_features=in_features, num_classes=num_classes)
        fraction(dropout=dropout)
        super().__init__()
        sizes = (in_features, *widths)
        self.hidden = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(widths)))
        # In a list of their own, so that the names of the weights are the same with and without dropout.
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in widths)
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        x = inputs.flatten(1)
        for linear, dropout in zip(self.hidden, self.dropouts, strict=True):
            x = dropout(torch.relu(linear(x)))
        logits: Tensor = self.head(x)
        return logits
