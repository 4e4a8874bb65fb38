"""Reading of data files, plain or gzipped, with limits on decompression and memory."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from enfold.errors import EnfoldError
from enfold.io.files import reading

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 1 << 20
PACKED = 100  # maximum compression ratio of contents above `SMALL` bytes, against decompression bombs
SMALL = 1 << 26


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of that name in the folder, plain or with .gz appended; None if there is none."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def require_plausible(path: Path, packed: int, unpacked: int) -> None:
    """Check the compression ratio of a file before it is decompressed.

    Args:
        path: The file, for the error message.
        packed: Compressed size in bytes.
        unpacked: Decompressed size in bytes.

    Raises:
        EnfoldError: If the ratio is too large.
    """
    if unpacked > max(SMALL, PACKED * packed):
        raise EnfoldError(
            f"{path} must not decompress to more than {PACKED} times its size, got {unpacked:,} bytes or more in "
            f"{packed:,}: save it without compression if you trust its source"
        )


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Check that data fit into the memory of this computer before they are allocated.

    Args:
        needed: Size in bytes.
        what: Name of the data in the error message.
        remedy: What the user can do.

    Raises:
        EnfoldError: If they do not fit.
    """
    names = getattr(os, "sysconf_names", {})
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise EnfoldError(
                f"{what} must fit into memory, got {needed / 1e9:,.1f} GB for {there / 1e9:,.1f} GB: {remedy}"
            )


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks, decompressed if its name ends in .gz.

    Raises:
        EnfoldError: If a gzip file is damaged.
    """
    done = 0
    try:
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            packed = path.stat().st_size
            while chunk := file.read(CHUNK):
                done += len(chunk)
                require_plausible(path, packed, done)
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnfoldError(
            f"{path} must be a complete gzip file, got a damaged one ({error}): delete it and fetch it again"
        ) from error


def read_bytes(path: Path) -> Bytes:
    """Return the bytes of a file, decompressed if its name ends in .gz, as a writable array."""
    if path.suffix != ".gz":
        with reading(path):
            return np.fromfile(path, dtype=np.uint8)
    content = bytearray()
    for chunk in chunks(path):
        content += chunk
    return np.frombuffer(content, dtype=np.uint8)


def content_md5(path: Path) -> str:
    """Return the MD5 of the decompressed content, which is equal for a file and its gzipped form."""
    found = hashlib.md5(usedforsecurity=False)
    for chunk in chunks(path):
        found.update(chunk)
    return found.hexdigest()


def file_md5(path: Path) -> str:
    """Return the MD5 of a file; the data sets publish no stronger checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
