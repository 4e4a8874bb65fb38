"""MediumCNN and SmallCNN: convolutions and pooling, from the loss-landscape study of deep ensembles.

Fort, Hu & Lakshminarayanan, "Deep Ensembles: A Loss Landscape Perspective", 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import image_shape, positive_tuple, require_fraction, require_positive


class MediumCNN(nn.Module):
    """Blocks of 3x3 convolution, dropout, 2x2 max-pooling and ReLU; no ReLU after the last pooling.

    As in the authors' code, weights and biases are initialized Xavier-uniform, and pooling rounds sizes up (7 to 4).
    971,146 parameters for 3x32x32 inputs and 10 classes.

    Args:
        shape: Shape of one image, (channels, height, width).
        num_classes: Number of classes.
        channels: Output channels of each convolution.
        dropout: Dropout rate after each convolution.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        channels: Sequence[int] = (64, 128, 256, 256),
        dropout: float = 0.1,
    ) -> None:
        in_channels, height, width = image_shape(shape)
        channels = positive_tuple("channels", channels, shortest=1)
        require_positive(num_classes=num_classes)
        require_fraction(dropout=dropout)
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
        """Initialize weights and biases Xavier-uniform."""
        for name, parameter in self.named_parameters():
            # The authors initialize a bias as a 1 x n matrix: uniform with bound sqrt(6 / (1 + n)).
            nn.init.xavier_uniform_(parameter.detach()[None] if name.endswith("bias") else parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, channels, height, width) -> (B, C)."""
        x = inputs
        for index, (conv, dropout) in enumerate(zip(self.convs, self.dropouts, strict=True)):
            x = self.pool(dropout(conv(x)))
            if index < len(self.convs) - 1:
                x = torch.relu(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class SmallCNN(MediumCNN):
    """MediumCNN with 16, 32 and 32 channels: 19,466 parameters for 3x32x32 inputs and 10 classes.

    Args:
        shape: Shape of an image, (channels, height, width).
        num_classes: Number of outputs.
        channels: Channels of the three blocks.
        dropout: Dropout rate after each convolution.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        channels: Sequence[int] = (16, 32, 32),
        dropout: float = 0.1,
    ) -> None:
        super().__init__(shape, num_classes, channels, dropout)
