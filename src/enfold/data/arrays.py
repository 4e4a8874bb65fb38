"""Conversion of arrays to checked tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from enfold.data.dataset import Split
from enfold.errors import EnfoldError

CHANNELS = (1, 3, 4)  # grey, RGB, RGBA: distinguishes (N, H, W, C) from (N, C, H, W)
MOST_CLASSES = 1_000_000  # each takes memory wherever classes are counted
CHUNK = 2048  # examples converted to double precision at a time


def as_inputs(array: np.ndarray[Any, Any], where: str) -> Tensor:
    """Return inputs as a tensor: uint8 is unchanged, floats become float32, images get the shape (N, C, H, W).

    uint8 arrays with three axes are grey images (N, H, W); channels in the last of four axes are moved to the second.
    Other arrays are not reshaped.

    Args:
        array: Array of numbers (N, ...).
        where: Its name in error messages.

    Raises:
        EnfoldError: If it is not an array of numbers with one row per example.
    """
    if array.ndim < 2 or array.dtype.kind not in "biuf":
        raise EnfoldError(
            f"{where} must be an array of numbers with one row per example, got {array.dtype} of shape {array.shape}: "
            "save numbers of shape (N, ...)"
        )
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[-1] in CHANNELS and array.shape[1] not in CHANNELS:
        array = np.moveaxis(array, -1, 1)
    if array.dtype != np.uint8:
        array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
    return torch.from_numpy(np.array(array, order="C"))


def as_labels(array: np.ndarray[Any, Any], where: str) -> Tensor:
    """Return integer labels (N,) or (N, 1) as an int64 tensor (N,).

    Args:
        array: Array of labels.
        where: Its name in error messages.

    Raises:
        EnfoldError: If it does not contain one integer per example.
    """
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    is_integer = array.dtype.kind in "iu" or (array.dtype.kind == "f" and bool((array == np.floor(array)).all()))
    if array.ndim != 1 or not is_integer:
        raise EnfoldError(
            f"{where} must be one integer per example, got {array.dtype} of shape {array.shape}: "
            "save class indices, for one-hot labels argmax(1)"
        )
    return torch.from_numpy(array.astype(np.int64))


def as_split(inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], where: str) -> Split:
    """Return arrays of inputs and labels as a split.

    Args:
        inputs: Array of inputs (N, ...).
        labels: Array of labels (N,).
        where: Their name in error messages.

    Raises:
        EnfoldError: If an array is invalid or their lengths differ.
    """
    tensors = as_inputs(inputs, f"the inputs of {where}"), as_labels(labels, f"the labels of {where}")
    if len(tensors[0]) != len(tensors[1]):
        raise EnfoldError(
            f"{where} must have as many labels as inputs, got {len(inputs)} inputs and {len(labels)} labels: "
            "save both for the same examples"
        )
    return Split(*tensors)


def check_split(split: Split, num_classes: int | None, where: str) -> None:
    """Check that a split has examples, labels in 0 ... num_classes - 1 and finite inputs.

    Args:
        split: The split.
        num_classes: Number of classes; None for targets that are not classes.
        where: Its name in error messages.

    Raises:
        EnfoldError: If a check fails.
    """
    if not len(split):
        raise EnfoldError(f"{where} must have at least one example, got none: add examples or remove the split")
    if num_classes is not None:
        _check_labels(split, num_classes, where)
    if split.inputs.is_floating_point():
        for start, chunk in zip(range(0, len(split), CHUNK), split.inputs.split(CHUNK), strict=True):
            bad = ~torch.isfinite(chunk).flatten(1).all(1)
            if bad.any():
                raise EnfoldError(
                    f"inputs must be finite, got NaN or infinity in example {start + int(bad.nonzero()[0])} of "
                    f"{where}: remove or correct such examples"
                )


def _check_labels(split: Split, num_classes: int, where: str) -> None:
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0:
        raise EnfoldError(f"labels must not be negative, got {low} in {where}: number the classes from 0")
    if high >= MOST_CLASSES:
        raise EnfoldError(f"labels must be below {MOST_CLASSES:,}, got {high} in {where}: number the classes from 0")
    if high >= num_classes:
        raise EnfoldError(
            f"labels must be 0 ... {num_classes - 1} for {num_classes} classes, got {high} in {where}: "
            "correct the labels, or train on every class that is tested"
        )


def channel_statistics(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and standard deviation of each channel (the second axis), for pixels scaled to [0, 1].

    The standard deviation of a constant channel is set to 1, so that normalization gives zeros.

    Returns:
        Mean and standard deviation; None for integers other than uint8.
    """
    if inputs.dtype == torch.uint8:
        mean, std = _uint8_statistics(inputs)
    elif inputs.is_floating_point():
        mean, std = _float_statistics(inputs)
    else:
        return None
    std = torch.where(std > 1e-7, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def _uint8_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics from a histogram: exact, and ten times as fast as sums in double precision."""
    channels = inputs.transpose(0, 1)
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in channels]
    ).double()  # (C, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    frequency = counts / counts.sum(1, keepdim=True)
    mean = frequency @ levels  # (C,)
    return mean, (frequency * (levels - mean[:, None]).square()).sum(1).sqrt()


def _float_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    chunks = inputs.flatten(2).split(CHUNK) if inputs.ndim > 2 else inputs[..., None].split(CHUNK)  # (n, C, the rest)
    count = inputs.numel() // inputs.shape[1]
    mean = sum((chunk.double().sum(2).sum(0) for chunk in chunks), torch.zeros(())) / count  # (C,)
    squares = ((chunk.double() - mean[:, None]).square().sum(2).sum(0) for chunk in chunks)
    return mean, (sum(squares, torch.zeros(())) / count).sqrt()
