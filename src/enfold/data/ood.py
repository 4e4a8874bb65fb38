"""Out-of-distribution images: another data set, classes that were held out, or noise, as a network would be shown them.

They are brought to the size and the channels of the data that a network was trained on and stay raw pixels, so that
they are normalised with that data's mean and deviation, like its own test images. What was done is told in words.
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
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as image files become grey
CHANNELS = {1: "grey", 3: "colour"}
CHUNK = 1024  # images resized at a time


@dataclass(frozen=True, repr=False)
class Outside(Split):
    """Examples from outside; labels are those of their own source and mean nothing to the network."""

    name: str
    adapted: str  # how, in words

    def __repr__(self) -> str:
        return f"Outside({self.name}: {len(self)} inputs of shape {tuple(self.inputs.shape[1:])}; {self.adapted})"

    def __getitem__(self, index: Tensor | slice) -> Outside:
        return replace(self, inputs=self.inputs[index], labels=self.labels[index])


def outside(split: Split, data: Data, name: str, examples: int | None = None) -> Outside:
    """`examples` of another data set's part, all of them by default, as the network of `data` would be shown them."""
    chosen = split[some(split.labels, examples)]
    inputs, adapted = adapt(chosen.inputs, data)
    return Outside(inputs, chosen.labels, name, adapted)


def noise(kind: Noise, data: Data, examples: int, seed: int = 0) -> Outside:
    """Images of noise: every value uniform in [0, 1], or normal with the data's own mean and deviation, clipped."""
    if kind not in get_args(Noise):
        raise EnfoldError(f"noise must be one of {', '.join(get_args(Noise))}, got {kind!r}: choose one")
    if examples < 1:
        raise EnfoldError(f"at least 1 image of noise must be made, got {examples}: leave it out for as many as tested")
    _require_images(data)
    draw = seeds.generator(seed, "noise", kind)
    shape = (examples, *data.shape)
    if kind == "uniform":
        values, how = torch.rand(shape, generator=draw), "every value is uniform in [0, 1]"
    else:
        mean, std = (torch.tensor(each, dtype=torch.float32)[:, None, None] for each in _statistics(data))
        values = torch.randn(shape, generator=draw).mul_(std).add_(mean).clamp_(0, 1)
        how = "every value is normal with the mean and deviation of its channel, clipped to [0, 1]"
    inputs = as_pixels(values) if _holds_bytes(data) else values
    return Outside(inputs, torch.zeros(examples, dtype=torch.long), f"{kind} noise", how)


def adapt(images: Tensor, data: Data) -> tuple[Tensor, str]:
    """Raw images (N, 1 or 3, H, W) in the size, channels and type of the data's own, and what was done to them."""
    _require_images(data)
    _require_pixels(images)
    channels, height, width = data.shape
    before, steps = images.shape[1:], []
    result = images
    if before[1:] != (height, width):
        result = _resized(result, (height, width))
        stretched = before[1] * width != before[2] * height
        steps.append(
            f"resized from {before[1]} x {before[2]} to {height} x {width} by bilinear interpolation"
            + (", which changes its proportions" if stretched else "")
        )
    if before[0] != channels:
        result = result.expand(-1, 3, -1, -1) if channels == 3 else _grey(result)
        how = "copied into three channels" if channels == 3 else "weighted by 0.299, 0.587, 0.114"
        steps.append(f"{CHANNELS[before[0]]} made {CHANNELS[channels]}, {how}")
    if not _holds_bytes(data):
        result = pixels(result)
    elif result.dtype != torch.uint8:
        result = as_pixels(result)
    steps.append("normalised with the mean and deviation of the data trained on" if data.mean else "not normalised")
    return result.contiguous(), "; ".join(steps)


def of_classes(split: Split, classes: Sequence[int]) -> Split:
    """The examples of these classes."""
    return split[torch.isin(split.labels, torch.tensor(list(classes)))]


def _require_images(data: Data) -> None:
    if len(data.shape) != 3 or data.shape[0] not in CHANNELS:
        raise EnfoldError(
            "images from outside are for data of grey or colour images, (1 or 3, H, W), got inputs of shape "
            f"{tuple(data.shape)}: leave ood out"
        )
    test = data.test
    if not isinstance(test, Split):
        raise EnfoldError(
            f"images from outside are adapted to a test part in memory, got a {type(test).__name__}: pass a Split"
        )
    if test.inputs.dtype != torch.uint8 and not _in_range(test.inputs):
        raise EnfoldError(
            "images from outside are normalised like the data's own, which must be raw pixels, bytes or in [0, 1], got "
            "other values in the test part: give the data before normalisation, with Data(mean=..., std=...)"
        )


def _require_pixels(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] not in CHANNELS or not len(images):
        raise EnfoldError(
            f"a set from outside must hold grey or colour images, (N, 1 or 3, H, W), got {tuple(images.shape)}: "
            "bring them into this shape, channels first"
        )
    if images.dtype != torch.uint8 and not _in_range(images):
        raise EnfoldError(
            f"images from outside must be bytes or lie in [0, 1], got {images.dtype} from {float(images.min()):.4g} to "
            f"{float(images.max()):.4g}: give them before normalisation, and divide by 255 what holds bytes"
        )


def _in_range(images: Tensor) -> bool:
    if not images.is_floating_point():
        return False
    low, high = (float(each) for each in images.aminmax())
    return low >= 0 and high <= 1  # also false where one is not a number


def _holds_bytes(data: Data) -> bool:
    return isinstance(data.test, Split) and data.test.inputs.dtype == torch.uint8


def _statistics(data: Data) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if data.mean is not None and data.std is not None:
        return data.mean, data.std
    found = channel_statistics(data.test.inputs) if isinstance(data.test, Split) else None
    if found is None:
        raise EnfoldError(
            "normal noise needs the mean and deviation of the data, which are not known: give Data(mean=..., std=...)"
        )
    return found


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    parts = [
        interpolate(pixels(part).float(), size, mode="bilinear", antialias=True).clamp_(0, 1)
        for part in images.split(CHUNK)
    ]
    return torch.cat([as_pixels(part) if images.dtype == torch.uint8 else part for part in parts])


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor(LUMA)[:, None, None]
    parts = [(pixels(part).float() * weights).sum(1, keepdim=True) for part in images.split(CHUNK)]
    return torch.cat([as_pixels(part) if images.dtype == torch.uint8 else part for part in parts])
