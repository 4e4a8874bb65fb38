"""ResNet: a residual network for small images.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.networks.arguments import require_choice, require_positive


class PadShortcut(nn.Module):
    """Option A of the paper: every other pixel, with zeros for the additional channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded input: (B, channels, H, W) -> (B, channels + new, H / 2, W / 2)."""
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm; the input is added before the last ReLU."""

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module
        if stride == 1:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(channels - in_channels)
        else:
            # The stride is a 1x1 pooling, because oneDNN (as of 3.12) corrupts memory in the channels-last weight
            # gradient of a strided 1x1 convolution with fewer channels than its vector width.
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(1, stride),
                nn.Conv2d(in_channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (B, in_channels, H, W) -> (B, channels, H / stride, W / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A convolution, three groups of n blocks and a linear head; depth = 6n + 2.

    For 3 input channels and 10 classes, ResNet-20 has 272,474 parameters with "projection" and 269,722 with "pad".

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        depth: Number of layers, 6n + 2.
        width: Channels of the first group; the others have 2 and 4 times as many.
        shortcut: Shortcut between groups: "projection" (option B of the paper, 1x1 convolution and batch norm), with
            which the channels of each group can be permuted independently, as merging needs; or "pad" (option A), which
            the paper uses on CIFAR-10.
        stem_stride: Stride of the first convolution; 2 reduces the cost to a quarter.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        depth: int = 20,
        width: int = 16,
        shortcut: str = "projection",
        stem_stride: int = 1,
    ) -> None:
        require_positive(
            in_channels=in_channels, num_classes=num_classes, depth=depth, width=width, stem_stride=stem_stride
        )
        require_choice("shortcut", shortcut, ("projection", "pad"))
        if depth < 8 or depth % 6 != 2:
            raise EnfoldError(f"depth must be 6n + 2, got {depth}: use for example 8, 14, 20 or 56")
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, stem_stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.groups = nn.ModuleList()
        channels = width
        for group in range(3):
            blocks = []
            for block in range((depth - 2) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                blocks.append(Block(channels, width * 2**group, stride, shortcut))
                channels = width * 2**group
            self.groups.append(nn.Sequential(*blocks))
        self.head = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize convolutions He-normal; other layers have PyTorch's default initialization."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, in_channels, height, width) -> (B, C)."""
        x = torch.relu(self.norm(self.conv(inputs)))
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


ResNet20 = ResNet  # the defaults are ResNet-20
