"""The binary format of CIFAR: records of one or two label bytes and 3 x 32 x 32 pixels, in a tar archive."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from enfold.data.dataset import Split
from enfold.data.raw import find_file, read_bytes
from enfold.errors import EnfoldError
from enfold.io.files import atomic_path, reading

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def read_records(path: Path, label_bytes: int) -> Split:
    """Return the images and labels of one file; for CIFAR-100 the fine labels.

    Args:
        path: The file.
        label_bytes: Label bytes per record: 1 for CIFAR-10, 2 for CIFAR-100.

    Raises:
        EnfoldError: If the size of the file is not a multiple of the record size.
    """
    content = read_bytes(path)
    record = label_bytes + PIXELS
    if not len(content) or len(content) % record:
        raise EnfoldError(
            f"{path} must consist of records of {record} bytes, got {len(content)} bytes: "
            "delete the file and fetch it again"
        )
    records = content.reshape(-1, record)
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, *SHAPE)
    return Split(torch.from_numpy(images), torch.from_numpy(records[:, label_bytes - 1].astype(np.int64)))


def read_cifar_folder(folder: Path, train: Sequence[str], test: Sequence[str], label_bytes: int) -> tuple[Split, Split]:
    """Return the training and test split from the named files of a folder.

    Args:
        folder: The folder.
        train: Names of the files with training examples.
        test: Names of the files with test examples.
        label_bytes: Bytes of labels before each image; the last one is used.
    """
    return _read_split(folder, train, label_bytes), _read_split(folder, test, label_bytes)


def _read_split(folder: Path, names: Sequence[str], label_bytes: int) -> Split:
    splits = [read_records(find_file(folder, name) or folder / name, label_bytes) for name in names]
    return Split(torch.cat([split.inputs for split in splits]), torch.cat([split.labels for split in splits]))


def extract(archive: Path, folder: Path, names: Sequence[str]) -> None:
    """Extract only the named files of an archive.

    Args:
        archive: The archive, with a top folder named like `folder`.
        folder: Folder to write to.
        names: Names of the files.

    Raises:
        EnfoldError: If the archive is damaged or lacks a file.
    """
    wanted = {PurePosixPath(folder.name, name): name for name in names}
    try:
        with reading(archive), tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = wanted.pop(PurePosixPath(member.name), None) if member.isfile() else None
                content = tar.extractfile(member) if name else None
                if name and content:
                    with atomic_path(folder / name) as temporary, temporary.open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnfoldError(
            f"{archive} must be a complete tar.gz archive, got a damaged one ({error}): delete it and fetch it again"
        ) from error
    if wanted:
        raise EnfoldError(
            f"{archive} must contain {', '.join(map(str, wanted))}, but it does not: replace it by the official archive"
        )
