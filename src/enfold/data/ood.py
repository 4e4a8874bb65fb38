"""Out-of-distribution (OOD) images: another data set, excluded classes, or noise.

They are converted to the size and channels of the training data and remain raw pixels, so that they are normalized with
the statistics of the training data like its test images. A text describes the conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from enfold import seeds
from enfold.data.arrays import channel_statistics
from enfold.data.corruptions.split import as_pixels
from enfold.data.dataset import Data, Split, pixels, some
from enfold.errors import EnfoldError

Noise = Literal["uniform", "gaussian"]
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
CHANNELS = {1: "grey", 3: "colour"}
CHUNK = 1024  # images resized at a time


@dataclass(frozen=True, repr=False)
class Outside(Split):
    """OOD examples; the labels are those of their source, unrelated to the classes of the network."""

    name: str
    adapted: str  # description of the conversion

    def __repr__(self) -> str:
        return f"Outside({self.name}: {len(self)} inputs of shape {tuple(self.inputs.shape[1:])}; {self.adapted})"

    def __getitem__(self, index: Tensor | slice) -> Outside:
        return replace(self, inputs=self.inputs[index], targets=self.targets[index])


def outside(split: Split, data: Data, name: str, examples: int | None = None) -> Outside:
    """Return examples of another data set, converted to the format of `data`.

    Args:
        split: A split of the other data set.
        data: The data the network was trained on.
        name: Name of the OOD set.
        examples: Number of examples; None for all.

    Raises:
        EnfoldError: If one of the two does not consist of images in raw pixels.
    """
    chosen = split[some(split.labels, examples)]
    inputs, adapted = adapt(chosen.inputs, data)
    return Outside(inputs, chosen.labels, name, adapted)


def noise(kind: Noise, data: Data, examples: int, seed: int = 0) -> Outside:
    """Return images of noise in the format of `data`.

    Args:
        kind: "uniform" in [0, 1], or "gaussian" with the mean and standard deviation of the data, clipped to [0, 1].
        data: The data the network was trained on.
        examples: Number of images.
        seed: Seed of the noise.

    Raises:
        EnfoldError: If an argument is invalid or the data are not images.
    """
    if kind not in get_args(Noise):
        raise EnfoldError(f"kind must be one of {', '.join(get_args(Noise))}, got {kind!r}: choose one of these")
    if examples < 1:
        raise EnfoldError(f"examples must be at least 1, got {examples}: raise examples")
    _require_images(data)
    draw = seeds.generator(seed, "noise", kind)
    shape = (examples, *data.shape)
    if kind == "uniform":
        values, how = torch.rand(shape, generator=draw), "uniform in [0, 1]"
    else:
        mean, std = (torch.tensor(each, dtype=torch.float32)[:, None, None] for each in _statistics(data))
        values = torch.randn(shape, generator=draw).mul_(std).add_(mean).clamp_(0, 1)
        how = "normal with the mean and standard deviation of each channel, clipped to [0, 1]"
    inputs = as_pixels(values) if _has_bytes(data) else values
    return Outside(inputs, torch.zeros(examples, dtype=torch.long), f"{kind} noise", how)


def adapt(images: Tensor, data: Data) -> tuple[Tensor, str]:
    """Convert images to the size, channels and type of `data`.

    Args:
        images: Raw images (N, 1 or 3, H, W).
        data: The data the network was trained on.

    Returns:
        The converted images and a description of the conversion.

    Raises:
        EnfoldError: If one of the two does not consist of images in raw pixels.
    """
    _require_images(data)
    _require_pixels(images)
    channels, height, width = data.shape
    before, steps = images.shape[1:], []
    result = images
    if before[1:] != (height, width):
        result = _resize(result, (height, width))
        stretched = before[1] * width != before[2] * height
        steps.append(
            f"resized from {before[1]} x {before[2]} to {height} x {width} by bilinear interpolation"
            + (", which changes the aspect ratio" if stretched else "")
        )
    if before[0] != channels:
        result = result.expand(-1, 3, -1, -1) if channels == 3 else _to_grey(result)
        how = "repeated in three channels" if channels == 3 else "weighted by 0.299, 0.587, 0.114"
        steps.append(f"{CHANNELS[before[0]]} converted to {CHANNELS[channels]}, {how}")
    if not _has_bytes(data):
        result = pixels(result)
    elif result.dtype != torch.uint8:
        result = as_pixels(result)
    steps.append("normalised with the statistics of the training data" if data.mean else "not normalised")
    return result.contiguous(), "; ".join(steps)


def of_classes(split: Split, classes: Sequence[int]) -> Split:
    """Return the examples of these classes."""
    return split[torch.isin(split.labels, torch.tensor(list(classes)))]


def _require_images(data: Data) -> None:
    if len(data.shape) != 3 or data.shape[0] not in CHANNELS:
        raise EnfoldError(
            f"data must be images of shape (1 or 3, H, W) for OOD images, got inputs of shape {tuple(data.shape)}: "
            "omit ood"
        )
    test = data.test
    if not isinstance(test, Split):
        raise EnfoldError(f"data.test must be in memory for OOD images, got a {type(test).__name__}: pass a Split")
    if test.inputs.dtype != torch.uint8 and not _in_range(test.inputs):
        raise EnfoldError(
            "data.test must be raw pixels (uint8 or in [0, 1]) for OOD images, got other values: pass the data before "
            "normalisation, with Data(mean=..., std=...)"
        )


def _require_pixels(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] not in CHANNELS or not len(images):
        raise EnfoldError(
            f"images must have shape (N, 1 or 3, H, W), got {tuple(images.shape)}: convert them to this shape, "
            "channels first"
        )
    if images.dtype != torch.uint8 and not _in_range(images):
        raise EnfoldError(
            f"images must be uint8 or in [0, 1], got {images.dtype} from {float(images.min()):.4g} to "
            f"{float(images.max()):.4g}: pass images before normalisation, divided by 255 if they are not uint8"
        )


def _in_range(images: Tensor) -> bool:
    if not images.is_floating_point():
        return False
    low, high = (float(each) for each in images.aminmax())
    return low >= 0 and high <= 1  # false for NaN


def _has_bytes(data: Data) -> bool:
    return isinstance(data.test, Split) and data.test.inputs.dtype == torch.uint8


def _statistics(data: Data) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if data.mean is not None and data.std is not None:
        return data.mean, data.std
    found = channel_statistics(data.test.inputs) if isinstance(data.test, Split) else None
    if found is None:
        raise EnfoldError("data must have mean and std for Gaussian noise, got neither: pass Data(mean=..., std=...)")
    return found


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    parts = [
        interpolate(pixels(part).float(), size, mode="bilinear", antialias=True).clamp_(0, 1)
        for part in images.split(CHUNK)
    ]
    return torch.cat([as_pixels(part) if images.dtype == torch.uint8 else part for part in parts])


def _to_grey(images: Tensor) -> Tensor:
    weights = torch.tensor(LUMA)[:, None, None]
    parts = [(pixels(part).float() * weights).sum(1, keepdim=True) for part in images.split(CHUNK)]
    return torch.cat([as_pixels(part) if images.dtype == torch.uint8 else part for part in parts])
