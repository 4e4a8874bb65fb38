"""The suite of 19 corruptions at five severities, for batches and splits."""

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
SMALLEST = 8  # minimum height and width
CHUNK = 2**18  # values processed at once: they fit into the cache, and memory does not grow with the batch
FEWEST = 8  # minimum number of images processed at once


def corrupt(
    images: Tensor, kind: str, severity: int, *, seed: int = 0, indices: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Return corrupted images of the same shape and type.

    Random draws for image i depend on (seed, kind, indices[i]) only.

    Args:
        images: Images (B, 1 or 3, H, W), uint8 or in [0, 1].
        kind: Kind of corruption, one of `KINDS`.
        severity: Severity from 1 to 5.
        seed: Seed of the random draws.
        indices: Indices of the images in the data set; the default is 0, 1, ...

    Raises:
        EnfoldError: If an argument is invalid.

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
        chunk = slice(start, start + size)
        values = _SUITE[kind](pixels(images[chunk]).float(), severity, Draws(seed, kind, numbers[chunk]))
        result[chunk] = as_pixels(values) if images.dtype == torch.uint8 else values.clamp(0, 1)
    return result


def corruptions(
    images: Tensor, kinds: Sequence[str] = STANDARD, severities: Sequence[int] = SEVERITIES, seed: int = 0
) -> Iterator[tuple[str, int, Tensor]]:
    """Return an iterator of (kind, severity, corrupted images), which are computed lazily.

    Args:
        images: Images (B, 1 or 3, H, W), uint8 or in [0, 1].
        kinds: Kinds of corruption; the default is the 15 standard ones.
        severities: Severities from 1 to 5.
        seed: Seed of the random draws.

    Raises:
        EnfoldError: If an argument is invalid.
    """
    for kind in kinds:
        check_kind(kind)
    for severity in severities:
        check_severity(severity)
    check_images(images)
    return ((kind, severity, corrupt(images, kind, severity, seed=seed)) for kind in kinds for severity in severities)


def corrupt_split(data: Data, kind: str, severity: int, part: str = "test", seed: int = 0) -> Corrupted:
    """Return a corrupted copy of a split, which can be used in its place.

    Args:
        data: The data.
        kind: Kind of corruption, one of `KINDS`.
        severity: Severity from 1 to 5.
        part: The split to corrupt: "train", "val" or "test".
        seed: Seed of the random draws.

    Raises:
        EnfoldError: If an argument is invalid or the split is not in memory.
    """
    if part not in ("train", "val", "test"):
        raise EnfoldError(f"part must be 'train', 'val' or 'test', got '{part}': choose one of these")
    split = getattr(data, part)
    if not isinstance(split, Split):
        raise EnfoldError(
            f"the {part} split must be in memory to be corrupted, got a {type(split).__name__}: "
            "call corrupt(images, kind, severity) for each batch"
        )
    return Corrupted(corrupt(split.inputs, kind, severity, seed=seed), split.labels, kind, severity)


def check_kind(kind: str) -> None:
    """Check that a kind of corruption exists.

    Raises:
        EnfoldError: If it does not; the message suggests the closest one.
    """
    if kind not in _SUITE:
        near = closest(kind, KINDS)
        hint = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(f"kind must be a known corruption, got '{kind}'{hint}: choose one of {', '.join(KINDS)}")


def check_severity(severity: int) -> None:
    """Check that a severity is an integer from 1 to 5.

    Raises:
        EnfoldError: If it is not.
    """
    if severity not in SEVERITIES or not hasattr(severity, "__index__"):  # 3.0 == 3, but is not an index
        raise EnfoldError(f"severity must be 1, 2, 3, 4 or 5, got {severity}: choose one of these")


def check_images(images: Tensor) -> None:
    """Check that a tensor is a batch of grey or RGB images, uint8 or finite in [0, 1].

    Raises:
        EnfoldError: If it is not.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < SMALLEST:
        raise EnfoldError(
            f"images must have shape (B, 1 or 3, H, W) with H and W at least {SMALLEST}, got {tuple(images.shape)}: "
            "convert them to this shape, channels first"
        )
    if images.dtype == torch.uint8 or not len(images):
        return
    if not images.is_floating_point():
        raise EnfoldError(f"images must be uint8 or floating point, got {images.dtype}: convert their type")
    low, high = (float(value) for value in images.aminmax())
    if not (low >= 0 and high <= 1):  # true for NaN
        raise EnfoldError(
            f"images must have values in [0, 1] without NaN, got {low:.4g} to {high:.4g}: "
            "corrupt images before normalisation, divided by 255 if they are not uint8"
        )


def _indices(images: Tensor, indices: Tensor | Sequence[int] | None) -> Tensor:
    if indices is None:
        return torch.arange(len(images), device=images.device)
    numbers = torch.as_tensor(indices, device=images.device)
    if numbers.shape != (len(images),) or numbers.is_floating_point():
        raise EnfoldError(
            f"indices must be one integer per image, got shape {tuple(numbers.shape)} of {numbers.dtype} for "
            f"{len(images)} images: pass their indices in the data set"
        )
    return numbers
