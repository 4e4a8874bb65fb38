"""ResNet-50 and MobileNetV2 as published, with the parameter shapes of torchvision's, for benches of large networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution with batch norm; the side of the image is divided by the stride."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Narrow, 3x3, four times as wide, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_norm(inputs, width, 1), nn.ReLU(), *conv_norm(width, width, 3, stride), nn.ReLU(),
            *conv_norm(width, 4 * width, 1),
        )  # fmt: skip
        changed = stride > 1 or inputs != 4 * width
        self.shortcut = nn.Sequential(*conv_norm(inputs, 4 * width, 1, stride)) if changed else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of both."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


class ResNet50(nn.Module):
    """K. He, X. Zhang, S. Ren, J. Sun: Deep Residual Learning for Image Recognition, CVPR 2016, arXiv:1512.03385."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 1 if index else stride))
                inputs = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.blocks(self.stem(inputs)).mean((2, 3)))
        return logits


class InvertedResidual(nn.Module):
    """Wide, depth-wise 3x3, narrow; with a shortcut where shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        wide = [*conv_norm(inputs, width, 1), nn.ReLU6()] if expansion > 1 else []
        self.body = nn.Sequential(
            *wide, *conv_norm(width, width, 3, stride, groups=width), nn.ReLU6(), *conv_norm(width, outputs, 1)
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's outputs."""
        outputs: Tensor = self.body(inputs)
        return inputs + outputs if self.has_shortcut else outputs


class MobileNetV2(nn.Module):
    """M. Sandler et al.: MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018, arXiv:1801.04381."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*conv_norm(3, 32, 3, 2), nn.ReLU6()]
        inputs = 32
        for expansion, outputs, count, stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
        ):  # fmt: skip
            for index in range(count):
                blocks.append(InvertedResidual(inputs, outputs, 1 if index else stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks, *conv_norm(inputs, 1280, 1), nn.ReLU6())
        self.head = nn.Linear(1280, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.blocks(inputs).mean((2, 3)))
        return logits
