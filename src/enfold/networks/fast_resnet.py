"""FastResNet: a shallow residual network with wide layers, which trains fast on small images.

After the networks of the DAWNBench competition: D. Page, "How to train your ResNet", 2018, and K. Jordan, "94 % on
CIFAR-10 in 3.29 seconds on a single GPU", 2024, arXiv:2404.00498. Differs from both: ReLU, PyTorch's default initial
weights, and no layer that whitens the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import positive_tuple, require_positive


class Group(nn.Module):
    """A convolution with 2x2 max-pooling, then a residual block of one convolution; both with batch norm."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the group's output: (B, in_channels, H, W) -> (B, channels, H / 2, W / 2)."""
        x = torch.relu(self.norm1(self.pool(self.conv1(x))))
        return x + torch.relu(self.norm2(self.conv2(x)))


class FastResNet(nn.Module):
    """A convolution, groups that halve the image, global max-pooling and a linear head.

    Weights are stored channels-last. For 3 input channels and 10 classes, 1,978,026 parameters and 152 million
    multiply-adds per 32x32 image.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        stem: Channels of the first convolution.
        widths: Channels of each group.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, stem: int = 32, widths: Sequence[int] = (64, 256, 256)
    ) -> None:
        widths = positive_tuple("widths", widths, shortest=1)
        require_positive(in_channels=in_channels, num_classes=num_classes, stem=stem)
        super().__init__()
        self.conv = nn.Conv2d(in_channels, stem, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(stem)
        sizes = (stem, *widths)
        self.groups = nn.ModuleList(Group(sizes[i], sizes[i + 1]) for i in range(len(widths)))
        self.head = nn.Linear(sizes[-1], num_classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on CPUs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, in_channels, height, width) -> (B, C)."""
        x = torch.relu(self.norm(self.conv(inputs)))
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.head(x.amax((2, 3)))
        return logits
