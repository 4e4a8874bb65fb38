"""The suite: nineteen ways to spoil an image, at five severities, for whole batches and whole splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from enfold.data.corruptions import blur, digital, jpeg, noise, spatter, weather
from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.split import Corrupted, as_pixels
from enfold.data.dataset import Data, Split, pixels
from enfold.errors import EnfoldError, closest

Corruption = Callable[[Tensor, int, Draws], Tensor]  # images in [0, 1], severity, random numbers -> images

_SUITE: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter.spatter,
    "saturate": digital.saturate,
}
KINDS = tuple(_SUITE)
STANDARD = KINDS[:15]
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels a side
CHUNK = 2**18  # values worked on at once: they stay in the cache, and memory does not grow with the batch
FEWEST = 8  # images at once, however large they are


def corrupt(
    images: Tensor, kind: str, severity: int, *, seed: int = 0, indices: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Corrupted images, (B, 1 or 3, H, W) as bytes or as numbers in [0, 1]; the type is kept.

    What is random about image i depends on (seed, kind, indices[i]) alone; `indices` are 0, 1, ... by default.

    >>> corrupt(torch.full((2, 3, 32, 32), 128, dtype=torch.uint8), "brightness", 1).unique().tolist()
    [141]
    """
    check_kind(kind)
    check_severity(severity)
    check_images(images)
    numbers = _indices(images, indices)
    result = torch.empty_like(images)
    size = max(FEWEST, CHUNK // max(1, images[:1].numel()))
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        spoiled = _SUITE[kind](pixels(images[part]).float(), severity, Draws(seed, kind, numbers[part]))
        result[part] = as_pixels(spoiled) if images.dtype == torch.uint8 else spoiled.clamp(0, 1)
    return result


def corruptions(
    images: Tensor, kinds: Sequence[str] = STANDARD, severities: Sequence[int] = SEVERITIES, seed: int = 0
) -> Iterator[tuple[str, int, Tensor]]:
    """(kind, severity, corrupted images) for every kind and severity, each computed when it is asked for."""
    for kind in kinds:
        check_kind(kind)
    for severity in severities:
        check_severity(severity)
    check_images(images)
    return ((kind, severity, corrupt(images, kind, severity, seed=seed)) for kind in kinds for severity in severities)


def corrupted(data: Data, kind: str, severity: int, part: str = "test", seed: int = 0) -> Corrupted:
    """A corrupted copy of a part of the data, before normalisation: pass it where that part would go."""
    if part not in ("train", "val", "test"):
        raise EnfoldError(f"a part must be train, validation or test, got '{part}': choose among these")
    split = getattr(data, part)
    if not isinstance(split, Split):
        raise EnfoldError(
            f"only examples in memory can be corrupted, but the {part} part is a {type(split).__name__}: "
            "pass its images to corrupt(images, kind, severity) batch by batch"
        )
    return Corrupted(corrupt(split.inputs, kind, severity, seed=seed), split.labels, kind, severity)


def check_kind(kind: str) -> None:
    """Refuse a corruption that there is not, and name the nearest."""
    if kind not in _SUITE:
        near = closest(kind, KINDS)
        hint = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(f"there is no corruption '{kind}'{hint}: choose one of {', '.join(KINDS)}")


def check_severity(severity: int) -> None:
    """Refuse what is not one of the five."""
    if severity not in SEVERITIES or not hasattr(severity, "__index__"):  # 3.0 is in them, and no place in a list
        raise EnfoldError(f"a severity must be 1, 2, 3, 4 or 5, got {severity}: choose among these")


def check_images(images: Tensor) -> None:
    """Refuse what is not a batch of grey or colour images with finite values in [0, 1] or bytes."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < SMALLEST:
        raise EnfoldError(
            f"corruptions need images of shape (B, 1 or 3, H, W) with at least {SMALLEST} pixels a side, got "
            f"{tuple(images.shape)}: bring them into this shape, channels first"
        )
    if images.dtype == torch.uint8 or not len(images):
        return
    if not images.is_floating_point():
        raise EnfoldError(f"images must be uint8 or floating point, got {images.dtype}: convert them")
    low, high = (float(value) for value in images.aminmax())
    if not (low >= 0 and high <= 1):  # also where one is not a number
        raise EnfoldError(
            f"images must have values in [0, 1] without NaN, got {low:.4g} to {high:.4g}: "
            "corrupt them before they are normalised, and divide by 255 what holds bytes"
        )


def _indices(images: Tensor, indices: Tensor | Sequence[int] | None) -> Tensor:
    if indices is None:
        return torch.arange(len(images), device=images.device)
    numbers = torch.as_tensor(indices, device=images.device)
    if numbers.shape != (len(images),) or numbers.is_floating_point():
        raise EnfoldError(
            f"indices must be one whole number an image, got shape {tuple(numbers.shape)} of {numbers.dtype} for "
            f"{len(images)} images: pass their positions in the data set"
        )
    return numbers
