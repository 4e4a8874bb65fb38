"""Bytes of a data file, plain or gzipped."""

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

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 1 << 20
PACKED = 100  # times smaller than its content: beyond that, and beyond `SMALL`, a packed file is taken for a bomb
SMALL = 1 << 26


def find_file(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder, plain or with .gz appended."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def require_plausible(path: Path, packed: int, unpacked: int) -> None:
    """Refuse content that is out of all proportion to the file that it is packed in, before it is unpacked."""
    if unpacked > max(SMALL, PACKED * packed):
        raise EnfoldError(
            f"{path} must not unpack to more than {PACKED} times its size, got {unpacked:,} bytes or more in "
            f"{packed:,}: save it without compression if you know where it is from"
        )


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse what cannot fit into the memory of this computer, before it is allocated."""
    names = getattr(os, "sysconf_names", {})
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise EnfoldError(
                f"{what} must fit into memory, got {needed / 1e9:,.1f} GB for {there / 1e9:,.1f} GB: {remedy}"
            )


def chunks(path: Path) -> Iterator[bytes]:
    """The content of a file piece by piece, unpacked if its name ends in .gz."""
    packed, done = path.stat().st_size, 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(CHUNK):
                done += len(chunk)
                require_plausible(path, packed, done)
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnfoldError(
            f"{path} must be a whole gzip file, got a truncated or foreign one ({error}): delete it and fetch it again"
        ) from error


def read_bytes(path: Path) -> Bytes:
    """All bytes of a file, unpacked if its name ends in .gz, as an array that may be written to."""
    if path.suffix != ".gz":
        return np.fromfile(path, dtype=np.uint8)
    content = bytearray()
    for chunk in chunks(path):
        content += chunk
    return np.frombuffer(content, dtype=np.uint8)


def content_md5(path: Path) -> str:
    """MD5 of the content, so that a file and its gzipped form have the same; raises like `read_bytes`."""
    found = hashlib.md5(usedforsecurity=False)
    for chunk in chunks(path):
        found.update(chunk)
    return found.hexdigest()


def file_md5(path: Path) -> str:
    """MD5 of the file as it lies there; the data sets publish no stronger checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
