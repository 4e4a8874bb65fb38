"""Bytes of a data file, plain or gzipped."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from enfold.errors import EnfoldError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def find_file(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder, plain or with .gz appended."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_bytes(path: Path) -> Bytes:
    """All bytes of a file, unpacked if its name ends in .gz, as an array that may be written to."""
    if path.suffix != ".gz":
        return np.fromfile(path, dtype=np.uint8)
    try:
        with gzip.open(path) as file:
            return np.frombuffer(bytearray(file.read()), dtype=np.uint8)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnfoldError(
            f"{path} must be a whole gzip file, got a truncated or foreign one ({error}): delete it and fetch it again"
        ) from error


def content_md5(path: Path) -> str:
    """MD5 of the content, so that a file and its gzipped form have the same; raises like `read_bytes`."""
    if path.suffix == ".gz":
        return hashlib.md5(read_bytes(path).data, usedforsecurity=False).hexdigest()
    return file_md5(path)


def file_md5(path: Path) -> str:
    """MD5 of the file as it lies there; the data sets publish no stronger checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
