"""IDX, the file format of MNIST and Fashion-MNIST: a magic number, the sizes, then unsigned bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from enfold.data.dataset import Split
from enfold.data.raw import chunks, find_file
from enfold.errors import EnfoldError

UNSIGNED_BYTES = 0x08
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def read_idx(path: Path, axes: int) -> Tensor:
    """Return the uint8 tensor of an IDX file, plain or gzipped.

    Args:
        path: The file.
        axes: Expected number of axes.

    Raises:
        EnfoldError: If the file is damaged or has another number of axes.
    """
    pieces, start = chunks(path), 4 + 4 * axes
    content = bytearray(next(pieces, b""))
    magic, expected = bytes(content[:4]), bytes((0, 0, UNSIGNED_BYTES, axes))
    if magic != expected or len(content) < start:
        raise EnfoldError(
            f"{path} must be an IDX file with {axes} axes (magic number {expected.hex()}), got one that starts with "
            f"{magic.hex() or 'nothing'}: replace it by the official file"
        )
    shape = struct.unpack_from(f">{axes}I", content, 4)
    size = start + math.prod(shape)
    if size == start:
        raise EnfoldError(
            f"{path} must have at least one value, got the shape {shape}: replace it by the official file"
        )
    for piece in pieces:
        content += piece
        if len(content) > size:  # longer than the header claims
            break
    if len(content) != size:
        got = "more" if len(content) > size else f"{len(content) - start}"
        raise EnfoldError(
            f"{path} must have {math.prod(shape)} bytes after its header for the shape {shape}, got {got}: "
            "delete the file and fetch it again"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def read_idx_folder(folder: Path) -> tuple[Split, Split]:
    """Return the training and test split of a folder in the layout of MNIST."""
    return _read_split(folder, TRAIN_IMAGES, TRAIN_LABELS), _read_split(folder, TEST_IMAGES, TEST_LABELS)


def _read_split(folder: Path, images_name: str, labels_name: str) -> Split:
    images = read_idx(find_file(folder, images_name) or folder / images_name, axes=3)
    labels = read_idx(find_file(folder, labels_name) or folder / labels_name, axes=1)
    if len(images) != len(labels):
        raise EnfoldError(
            f"{images_name} and {labels_name} must have the same length, got {len(images)} images and {len(labels)} "
            f"labels in {folder}: replace them by the official files"
        )
    return Split(images[:, None], labels.long())
