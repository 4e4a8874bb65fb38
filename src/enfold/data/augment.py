"""Augmentation of image batches in PyTorch, before normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from enfold.errors import EnfoldError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # (B, C, H, W) and a CPU generator -> (B, C, H, W)


def pad_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return each image shifted by a random offset of at most `padding` pixels per axis, padded with 0.

    Args:
        images: Images (B, C, H, W).
        generator: CPU generator of the offsets.
        padding: Maximum offset.

    Raises:
        EnfoldError: If the inputs are not images.
    """
    _require_images(images)
    batch, _, height, width = images.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, batch), generator=generator).to(images.device)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p + 1, 2p + 1, H, W), a view
    return windows[torch.arange(batch, device=images.device), :, offsets[0], offsets[1]]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image flipped horizontally with probability 1/2.

    Args:
        images: Images (B, C, H, W).
        generator: CPU generator of the choices.

    Raises:
        EnfoldError: If the inputs are not images.
    """
    _require_images(images)
    mirrored = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


AUGMENTATIONS: dict[str, Augmentation] = {"pad-crop": pad_crop, "flip": flip}


def augmentation(names: Sequence[str]) -> Augmentation:
    """Return a function that applies the named augmentations, for example ``augmentation(["pad-crop", "flip"])``.

    Args:
        names: Names from `AUGMENTATIONS`, in the order of application.

    Raises:
        EnfoldError: If a name is unknown.
    """
    for name in names:
        if name not in AUGMENTATIONS:
            raise EnfoldError(f"augment must contain only {', '.join(AUGMENTATIONS)}, got '{name}': choose from these")
    steps = [AUGMENTATIONS[name] for name in names]

    def apply(images: Tensor, generator: torch.Generator) -> Tensor:
        for step in steps:
            images = step(images, generator)
        return images

    return apply


def _require_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise EnfoldError(
            f"augment needs images of shape (B, C, H, W), got inputs of shape {tuple(images.shape)}: "
            "use augment=() for other data"
        )
