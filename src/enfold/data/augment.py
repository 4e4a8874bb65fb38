"""Augmentation of whole batches in plain torch, drawn from a generator, before pixels are normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from enfold.errors import EnfoldError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # (B, C, H, W) and a CPU generator -> (B, C, H, W)


def pad_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by its own offset of at most `padding` pixels each way; what moves in is black (0)."""
    _require_images(images)
    batch, _, height, width = images.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, batch), generator=generator).to(images.device)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p + 1, 2p + 1, H, W): a view, nothing is copied
    return windows[torch.arange(batch, device=images.device), :, offsets[0], offsets[1]]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image from left to right with probability 1/2."""
    _require_images(images)
    mirrored = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


AUGMENTATIONS: dict[str, Augmentation] = {"pad-crop": pad_crop, "flip": flip}


def augmentation(names: Sequence[str]) -> Augmentation:
    """One augmentation that applies the named ones in turn, for example ``augmentation(["pad-crop", "flip"])``."""
    for name in names:
        if name not in AUGMENTATIONS:
            raise EnfoldError(
                f"an augmentation must be one of {', '.join(AUGMENTATIONS)}, got '{name}': choose among these"
            )
    steps = [AUGMENTATIONS[name] for name in names]

    def apply(images: Tensor, generator: torch.Generator) -> Tensor:
        for step in steps:
            images = step(images, generator)
        return images

    return apply


def _require_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise EnfoldError(
            f"augmentation needs images of shape (B, C, H, W), got {tuple(images.shape)}: "
            "leave the augmentations out for data that are not images"
        )
