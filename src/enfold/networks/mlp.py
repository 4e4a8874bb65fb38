"""MLP: a multilayer perceptron with ReLU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import positive_tuple, require_fraction, require_positive


class MLP(nn.Module):
    """Hidden layers of linear, ReLU and dropout, with PyTorch's default initialization; inputs are flattened.

    The defaults give 784-512-256-128-10 with 567,434 parameters.

    Args:
        in_features: Size of the flattened input.
        widths: Widths of the hidden layers; empty for a linear classifier.
        num_classes: Number of classes.
        dropout: Dropout rate after each hidden layer.
    """

    def __init__(
        self,
        in_features: int = 784,
        widths: Sequence[int] = (512, 256, 128),
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        widths = positive_tuple("widths", widths)
        require_positive(in_features=in_features, num_classes=num_classes)
        require_fraction(dropout=dropout)
        super().__init__()
        sizes = (in_features, *widths)
        self.hidden = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(widths)))
        # In a separate list, so that the names of the weights do not depend on dropout.
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in widths)
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, ...) -> (B, C)."""
        x = inputs.flatten(1)
        for linear, dropout in zip(self.hidden, self.dropouts, strict=True):
            x = dropout(torch.relu(linear(x)))
        logits: Tensor = self.head(x)
        return logits
