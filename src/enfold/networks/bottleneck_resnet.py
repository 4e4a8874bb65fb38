"""BottleneckResNet: the residual networks for ImageNet, such as ResNet-50.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from enfold.networks.arguments import positive_tuple, require_choice, require_positive

EXPANSION = 4  # channels after a block, relative to those inside


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with batch norm; the input is added before the last ReLU."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out:
            # The stride is a 1x1 pooling, as in `ResNet`.
            strided = [nn.AvgPool2d(1, stride)] if stride != 1 else []
            self.shortcut = nn.Sequential(*strided, nn.Conv2d(in_channels, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (B, in_channels, H, W) -> (B, 4 channels, H / stride, W / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class BottleneckResNet(nn.Module):
    """A stem, four groups of bottleneck blocks and a linear head.

    With the default arguments it is ResNet-50: 25,557,032 parameters for 1,000 classes. The stride of a group is in its
    3x3 convolution, as in the implementations whose results are usually compared, not in its first 1x1 convolution.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        blocks: Number of blocks in each group: (3, 4, 6, 3) for ResNet-50, (3, 4, 23, 3) for ResNet-101.
        width: Channels inside the blocks of the first group, which double with each group.
        stem: "imagenet" (7x7 convolution and max pooling, which divide the size by 4), or "small" (a 3x3 convolution,
            which leaves it) for small images.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 1000,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        stem: str = "imagenet",
    ) -> None:
        require_positive(in_channels=in_channels, num_classes=num_classes, width=width)
        require_choice("stem", stem, ("imagenet", "small"))
        counts = positive_tuple("blocks", blocks, shortest=1)
        super().__init__()
        is_large = stem == "imagenet"
        size, stride = (7, 2) if is_large else (3, 1)
        self.conv = nn.Conv2d(in_channels, width, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool: nn.Module = nn.MaxPool2d(3, 2, padding=1) if is_large else nn.Identity()
        self.groups = nn.ModuleList()
        channels = width
        for group, count in enumerate(counts):
            inside = width * 2**group
            layers = []
            for block in range(count):
                layers.append(Bottleneck(channels, inside, 2 if group > 0 and block == 0 else 1))
                channels = EXPANSION * inside
            self.groups.append(nn.Sequential(*layers))
        self.head = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize convolutions He-normal; other layers have PyTorch's default initialization."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, in_channels, height, width) -> (B, C)."""
        x = self.pool(torch.relu(self.norm(self.conv(inputs))))
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
