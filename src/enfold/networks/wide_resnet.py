"""WideResNet: a residual network with few layers and many channels.

Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016, arXiv:1605.07146.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.networks.arguments import require_fraction, require_positive


class Block(nn.Module):
    """Twice batch norm, ReLU and 3x3 convolution, added to the input or its 1x1 projection."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (B, in_channels, H, W) -> (B, channels, H / stride, W / stride)."""
        y = self.conv1(torch.relu(self.norm1(x)))
        y = self.conv2(self.dropout(torch.relu(self.norm2(y))))
        total: Tensor = y + self.shortcut(x)
        return total


class WideResNet(nn.Module):
    """WRN-d-k: a convolution, three groups of n blocks (16k, 32k, 64k channels) and a linear head; d = 6n + 4.

    WRN-28-10 has 28 convolutions, 25 batch norms and 36,479,194 parameters (3 input channels, 10 classes).

    Differs from the paper: projections are applied to the input of the block, not after batch norm and ReLU, as in
    the TensorFlow implementation behind the published ensemble tables.

    Args:
        depth: Number of layers d.
        widen_factor: Factor k on the channels.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        dropout: Dropout rate between the two convolutions of a block.
    """

    def __init__(
        self,
        depth: int = 28,
        widen_factor: int = 10,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        require_positive(depth=depth, widen_factor=widen_factor, num_classes=num_classes, in_channels=in_channels)
        require_fraction(dropout=dropout)
        if depth < 10 or depth % 6 != 4:
            raise EnfoldError(f"depth must be 6n + 4, got {depth}: use for example 10, 16, 22, 28 or 40")
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.groups = nn.ModuleList()
        channels = 16
        for group in range(3):
            blocks = []
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                blocks.append(Block(channels, 16 * widen_factor * 2**group, stride, dropout))
                channels = 16 * widen_factor * 2**group
            self.groups.append(nn.Sequential(*blocks))
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights of convolutions and head He-normal, and the bias of the head to zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, in_channels, height, width) -> (B, C)."""
        x = self.conv(inputs)
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.head(torch.relu(self.norm(x)).mean((2, 3)))
        return logits
