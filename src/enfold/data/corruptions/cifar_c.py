"""The official CIFAR-10-C and CIFAR-100-C: a folder with one .npy file per kind, severities concatenated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from enfold.data.corruptions.split import Corrupted
from enfold.data.corruptions.suite import KINDS, check_kind, check_severity
from enfold.errors import EnfoldError
from enfold.io.files import parsing

IMAGES = 10_000  # per severity
IMAGE = (32, 32, 3)
LABELS = "labels.npy"

Array = np.ndarray[Any, np.dtype[np.uint8]]


def cifar_c_kinds(folder: str | Path) -> tuple[str, ...]:
    """Return the kinds whose files are in the folder, in the order of `KINDS`."""
    return tuple(kind for kind in KINDS if (Path(folder) / f"{kind}.npy").is_file())


def read_cifar_c(folder: str | Path, kind: str, severity: int) -> Corrupted:
    """Return the 10,000 test images of one kind and severity with their labels.

    Args:
        folder: Folder of the extracted official archive.
        kind: Kind of corruption, one of `KINDS`.
        severity: Severity from 1 to 5.

    Raises:
        EnfoldError: If a file is missing or damaged, or an argument is invalid.
    """
    check_kind(kind)
    check_severity(severity)
    folder = Path(folder)
    labels = _open(folder / LABELS, (), folder)
    images = _open(folder / f"{kind}.npy", IMAGE, folder)
    part = slice((severity - 1) * IMAGES, severity * IMAGES)
    classes = np.array(labels[part], dtype=np.int64)
    inputs = torch.from_numpy(np.ascontiguousarray(images[part].transpose(0, 3, 1, 2)))
    source = "CIFAR-10-C" if int(labels.max()) < 10 else "CIFAR-100-C"
    return Corrupted(inputs, torch.from_numpy(classes), kind, severity, source)


def _open(path: Path, one: tuple[int, ...], folder: Path) -> Array:
    """Return the memory-mapped array of 5 x 10,000 entries of shape `one`."""
    shape = (5 * IMAGES, *one)
    if not path.is_file():
        there = ", ".join(cifar_c_kinds(folder)) or "no kind of corruption"
        raise EnfoldError(
            f"{path} must exist to read CIFAR-10-C or CIFAR-100-C, got a folder with {there}: extract the official "
            "archive there, or create corrupted images with enfold.data.corrupt_split"
        )
    with parsing(path, "a complete .npy file of plain bytes", "extract the official archive again"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype.kind not in "ui":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise EnfoldError(
            f"{path} must have integers of shape {shape}, got {found}: extract the official archive again"
        )
    return array
