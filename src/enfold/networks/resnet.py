"""ResNet: the residual network for small images.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.networks.arguments import one_of, whole


class PadShortcut(nn.Module):
    """The paper's option A: every other pixel, and zeros for the channels that are new."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, channels + new, H / 2, W / 2)."""
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm, and the input added before the last ReLU."""

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
            # The stride is a pool of one pixel, because oneDNN (as of 3.12) corrupts memory in the weight gradient
            # of a strided 1x1 convolution over fewer channels than its vectors hold, in channels-last.
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(1, stride),
                nn.Conv2d(in_channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, channels, H / stride, W / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """depth = 6n + 2: a convolution, three groups of n blocks and a linear head.

    The groups have `width`, 2 x `width` and 4 x `width` channels. `shortcut` is what crosses from one group
    to the next: "projection" (the paper's option B, 1x1 convolution and batch norm) is the default because it
    leaves the channels of each group free to be permuted, which merging needs; "pad" (option A) is what the
    paper uses on CIFAR-10. For 3 input channels and 10 classes, ResNet-20 has 272,474 parameters with
    "projection" and 269,722 with "pad". A `stem_stride` of 2 halves the image at once: a quarter of the work.
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
        whole(in_channels=in_channels, num_classes=num_classes, depth=depth, width=width, stem_stride=stem_stride)
        one_of("shortcut", shortcut, ("projection", "pad"))
        if depth < 8 or depth % 6 != 2:
            raise EnfoldError(f"the depth of a ResNet must be 6n + 2, got {depth}: use for example 8, 14, 20 or 56")
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
        """Draw the convolutions as He et al. do; all other layers start as torch starts them."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, in_channels, height, width) -> (B, C)."""
        x = torch.relu(self.norm(self.conv(inputs)))
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


ResNet20 = ResNet  # its defaults are ResNet-20
