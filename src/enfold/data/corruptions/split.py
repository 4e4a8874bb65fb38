"""Splits of corrupted examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enfold.data.dataset import Split

OURS = "corrupted"  # the source of images corrupted by this package

#: Replacements of operations that need photographs or other libraries.
STANDS_IN = {"frost": "generated texture", "spatter": "approximate edges"}


@dataclass(frozen=True, repr=False)
class Corrupted(Split):
    """Corrupted examples.

    Args:
        inputs: Corrupted images.
        targets: Their targets.
        kind: Kind of corruption.
        severity: Severity from 1 to 5.
        source: "corrupted" for corruptions by this package, else "CIFAR-10-C" or "CIFAR-100-C".
        mean: Mean of each channel of pixels in [0, 1], subtracted when a batch is prepared.
        std: Standard deviation of each channel, divided by when a batch is prepared.
    """

    kind: str
    severity: int
    source: str = OURS

    @property
    def name(self) -> str:
        """The name in tables, for example "corrupted frost 3 (generated texture)" or "CIFAR-10-C frost 3"."""
        note = STANDS_IN.get(self.kind) if self.source == OURS else None
        return f"{self.source} {self.kind} {self.severity}" + (f" ({note})" if note else "")

    def __repr__(self) -> str:
        return (
            f"Corrupted({self.name}: {len(self)} inputs of shape {tuple(self.inputs.shape[1:])}, {self.inputs.dtype})"
        )

    def __getitem__(self, index: Tensor | slice) -> Corrupted:
        return replace(self, inputs=self.inputs[index], targets=self.targets[index])


def as_pixels(images: Tensor) -> Tensor:
    """Return values in [0, 1] as uint8; halves are rounded up in spite of rounding errors."""
    return images.clamp(0, 1).mul_(255).add_(0.5 + 1 / 1024).floor_().to(torch.uint8)
