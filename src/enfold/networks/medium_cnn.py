"""MediumCNN and SmallCNN: plain convolutions and pooling, from the loss-landscape study of deep ensembles.

Fort, Hu & Lakshminarayanan, "Deep Ensembles: A Loss Landscape Perspective", 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import fraction, image_shape, whole, whole_list


class MediumCNN(nn.Module):
    """3x3 convolution, dropout, 2x2 max-pool and ReLU for each of the channels; no ReLU after the last pool.

    As in the authors' code, weights and biases start Xavier-uniform, and an odd side is pooled up, 7 to 4.
    There are 971,146 parameters for 3x32x32 inputs and 10 classes.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        channels: Sequence[int] = (64, 128, 256, 256),
        dropout: float = 0.1,
    ) -> None:
        in_channels, height, width = image_shape(shape)
        channels = whole_list("channels", channels, shortest=1)
        whole(num_classes=num_classes)
        fraction(dropout=dropout)
        super().__init__()
        sizes = (in_channels, *channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], kernel_size=3, padding=1) for i in range(len(channels))
        )
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in channels)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        shrink = 2 ** len(channels)
        self.head = nn.Linear(channels[-1] * -(-height // shrink) * -(-width // shrink), num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases anew."""
        for name, parameter in self.named_parameters():
            # The authors draw a bias as a matrix of 1 x n, so uniformly up to sqrt(6 / (1 + n)).
            nn.init.xavier_uniform_(parameter.detach()[None] if name.endswith("bias") else parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, C)."""
        x = inputs
        for index, (conv, dropout) in enumerate(zip(self.convs, self.dropouts, strict=True)):
            x = self.pool(dropout(conv(x)))
            if index < len(self.convs) - 1:
                x = torch.relu(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class SmallCNN(MediumCNN):
    """MediumCNN with 16, 32 and 32 channels: 19,466 parameters for 3x32x32 inputs and 10 classes."""

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        channels: Sequence[int] = (16, 32, 32),
        dropout: float = 0.1,
    ) -> None:
        super().__init__(shape, num_classes, channels, dropout)
