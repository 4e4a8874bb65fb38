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


AREA = (0.08, 1.0)  # of a crop, as a fraction of the image
RATIO = (3 / 4, 4 / 3)  # of width and height of a crop
TRIALS = 10


def inception_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random crop of each image, resized to the size of the image.

    The area of a crop is uniform in 8 to 100 % of the image, and the logarithm of its aspect ratio in 3/4 to 4/3; of
    ten draws the first that fits is used, or else the complete image. Crops are resized bilinearly, without
    antialiasing. C. Szegedy et al., "Going deeper with convolutions", CVPR 2015, arXiv 1409.4842.

    Args:
        images: Images (B, C, H, W).
        generator: CPU generator of the crops.

    Raises:
        EnfoldError: If the inputs are not images.
    """
    _require_images(images)
    batch, _, height, width = images.shape
    draws = torch.rand(4, TRIALS, batch, generator=generator, dtype=torch.float64)
    area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * draws[0])
    low, high = (torch.tensor(each, dtype=torch.float64).log() for each in RATIO)
    ratio = torch.exp(low + (high - low) * draws[1])
    across, down = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()  # (trials, B)
    fits = (across >= 1) & (down >= 1) & (across <= width) & (down <= height)
    chosen = fits.double().argmax(0, keepdim=True)  # the first
    across, down, left, top = (each.gather(0, chosen)[0] for each in (across, down, draws[2], draws[3]))
    is_possible = fits.any(0)
    across, down = torch.where(is_possible, across, width), torch.where(is_possible, down, height)
    left, top = (left * (width - across + 1)).floor(), (top * (height - down + 1)).floor()
    theta = torch.zeros(batch, 2, 3, dtype=torch.float64)  # from the output's coordinates in [-1, 1] to the input's
    theta[:, 0, 0], theta[:, 0, 2] = across / width, (2 * left + across) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = down / height, (2 * top + down) / height - 1
    grid = torch.nn.functional.affine_grid(theta.to(images), list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


AUGMENTATIONS: dict[str, Augmentation] = {"pad-crop": pad_crop, "flip": flip, "inception-crop": inception_crop}


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
