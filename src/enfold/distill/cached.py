"""A teacher's answers in a file: the logits of M members for the N training examples, memory-mapped when read.

The file is a safetensors file with one tensor, `logits` (M, N, C). It is written in pieces, so that neither writing nor
reading it needs the memory that it fills on disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.io.files import atomic_path, parsing
from enfold.io.identity import Identity

DTYPES: dict[str, tuple[type[np.floating[Any]], torch.dtype]] = {
    "F16": (np.float16, torch.float16),
    "F32": (np.float32, torch.float32),
    "F64": (np.float64, torch.float64),
}

HEADER = 1 << 20  # bytes: the header of a file with one tensor is far smaller


class CachedTeacher:
    """A teacher that is only known by what it said about the training part, in that part's order."""

    def __init__(self, logits: Tensor, key: str = "", about: Identity | None = None) -> None:
        if logits.ndim != 3 or not logits.is_floating_point():
            raise EnfoldError(
                f"recorded answers must be logits of shape (members, examples, classes), got {tuple(logits.shape)} of "
                f"{logits.dtype}: stack one (examples, classes) tensor a member"
            )
        self.logits, self.key = logits, key
        self.about = dict(about or {})  # what tells the inputs that were answered from others; empty if nobody knows
        self.num_members, self.num_examples, self.num_classes = logits.shape

    @classmethod
    def load(cls, path: str | Path) -> CachedTeacher:
        """The answers in a safetensors file, mapped, not read."""
        path = Path(path)
        with parsing(path, "a safetensors file with floating-point 'logits'", "write it with CachedTeacher.save"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, HEADER)))
            (start, end), shape = header["logits"]["data_offsets"], tuple(header["logits"]["shape"])
            number, known = DTYPES[header["logits"]["dtype"]]
            told = dict(header.get("__metadata__", {}))
            about = dict(json.loads(told.get("about") or "{}"))
            whole = 0 <= start <= end <= path.stat().st_size - 8 - size and min(shape) >= 0
            if not whole or end - start != math.prod(shape) * known.itemsize:
                raise ValueError("its header does not fit its size")
            # "c": pages are read when they are asked for, and nothing that is done to them reaches the file
            mapped = np.memmap(path, dtype=number, mode="c", offset=8 + size + start, shape=shape)
        return cls(torch.from_numpy(mapped), str(told.get("key", "")), about)

    def save(self, path: str | Path) -> Path:
        """Write the answers; the counterpart of `load`."""
        pieces = (self.logits[:, start : start + 4096] for start in range(0, self.num_examples, 4096))
        told = {"key": self.key, "about": json.dumps(self.about)}
        return write_answers(Path(path), pieces, tuple(self.logits.shape), told, self.logits.dtype)


def write_answers(
    path: Path, pieces: Iterable[Tensor], shape: tuple[int, ...], told: dict[str, str], dtype: torch.dtype
) -> Path:
    """Write logits (M, N, C) that come as pieces (M, n, C) to a file that is whole or absent."""
    kind = next(name for name, (_, known) in DTYPES.items() if known == dtype)
    size = math.prod(shape) * dtype.itemsize
    header = json.dumps(
        {"__metadata__": told, "logits": {"dtype": kind, "shape": list(shape), "data_offsets": [0, size]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    # Written, not mapped: a disk that fills up raises an error, where a mapped page would end the process.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start, done = file.tell(), 0
        _reserve(file, start + size)
        for piece in pieces:
            for member, logits in enumerate(piece.cpu().contiguous()):
                file.seek(start + (member * shape[1] + done) * shape[2] * dtype.itemsize)
                file.write(logits.numpy())
            done += piece.shape[1]
        if done != shape[1]:
            raise EnfoldError(f"a teacher must answer for all {shape[1]} examples, got {done} answers: check the data")
    return path


def _reserve(file: BinaryIO, size: int) -> None:
    """Take the space on disk before anything is computed, where the system can."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
