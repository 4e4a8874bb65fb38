"""A split that remembers how it was corrupted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enfold.data.dataset import Split

OURS = "corrupted"  # by this package; the official files have their own names

#: What stands in for the original where it needs photographs or another library's image operations.
STANDS_IN = {"frost": "generated texture", "spatter": "approximate edges"}


@dataclass(frozen=True, repr=False)
class Corrupted(Split):
    """Corrupted examples; `source` is "corrupted" for enfold's own, "CIFAR-10-C" or "CIFAR-100-C" for the official."""

    kind: str
    severity: int
    source: str = OURS

    @property
    def name(self) -> str:
        """For tables, for example "corrupted frost 3 (generated texture)" or "CIFAR-10-C frost 3"."""
        note = STANDS_IN.get(self.kind) if self.source == OURS else None
        return f"{self.source} {self.kind} {self.severity}" + (f" ({note})" if note else "")

    def __repr__(self) -> str:
        return (
            f"Corrupted({self.name}: {len(self)} inputs of shape {tuple(self.inputs.shape[1:])}, {self.inputs.dtype})"
        )

    def __getitem__(self, index: Tensor | slice) -> Corrupted:
        return replace(self, inputs=self.inputs[index], labels=self.labels[index])


def as_pixels(images: Tensor) -> Tensor:
    """Values in [0, 1] as bytes; halves go up, whatever the last bit of a product is."""
    return images.clamp(0, 1).mul_(255).add_(0.5 + 1 / 1024).floor_().to(torch.uint8)
