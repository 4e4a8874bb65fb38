"""Files that are whole or absent: temporary file, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 24  # bytes that are digested at a time


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds it replaces `path`, else it is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnfoldError(
            f"a folder must be one that can be written, but '{path.parent}' is not ({error.strerror}): choose another"
        ) from error
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")  # containers share ids
    try:
        yield temporary
        with temporary.open("r+b") as written:  # Windows syncs only what may be written
            os.fsync(written.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, keys in the order given, one file that diffs well."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(tensors: Iterable[Tensor], text: str = "") -> str:
    """What tells these values, and a text, from all others."""
    import torch

    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        rows = max(1, CHUNK // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
        for piece in tensor.detach().split(rows) if tensor.ndim else [tensor.detach()]:  # not copied all at once
            flat = piece.cpu().flatten().clone(memory_format=torch.contiguous_format)
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def part_file(file: Path, part: object) -> Path:
    """The file of one part of what a file is for, beside it."""
    return file.with_name(f"{file.stem}-{part}{file.suffix}")
