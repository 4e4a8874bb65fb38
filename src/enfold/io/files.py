"""Files that are whole or absent: temporary file, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from enfold.errors import EnfoldError, WriteError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 24  # bytes that are digested at a time


@contextmanager
def atomic_path(path: Path, *, parents: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds it replaces `path`, else it is removed.

    The folder is made if it is missing; its own folder too, unless `parents` is false.
    """
    with writing(path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=parents, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with _in_use(path.parent) as sync:
            try:
                yield temporary
                with temporary.open("r+b") as written:  # Windows syncs only what may be written
                    os.fsync(written.fileno())
                temporary.chmod(0o666 & ~_umask())  # safetensors lets nobody else read what it writes
                temporary.replace(path)  # of a symbolic link the link itself, not what it leads to
                sync()
            finally:
                temporary.unlink(missing_ok=True)


@cache
def _umask() -> int:
    """Return the process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what the system says against writing `path` inside the block as one `WriteError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(path, error) from error


@contextmanager
def _in_use(folder: Path) -> Iterator[Callable[[], None]]:
    """Mark a folder as being written, so that nobody takes its temporary files for stale; yield what syncs it."""
    if os.name != "posix":
        yield lambda: None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, alone=False)
        yield lambda: os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, alone: bool) -> bool:
    """Lock what is open, without waiting; False where another process has it, or the system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    except (ImportError, OSError):
        return False
    return True


def remove_stale_parts(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder and below it."""
    for place in {part.parent for part in folder.rglob(".*.part")}:
        with suppress(OSError):  # gone since, or not ours to change: they do no harm
            descriptor = os.open(place, os.O_RDONLY)
            try:
                for part in place.glob(".*.part") if _lock(descriptor, alone=True) else ():
                    part.unlink()
            finally:
                os.close(descriptor)


def not_followed(name: str, flags: int) -> int:
    """Open a file, but not through a symbolic link: an `opener` for what is written in place."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file; what an interrupted write left there is ended first."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with open(path, "a+b", opener=not_followed) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())


@contextmanager
def parsing(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Raise whatever a damaged or foreign file makes its reader raise inside the block as one `EnfoldError`."""
    try:
        yield
    except EnfoldError:
        raise
    except Exception as error:  # readers raise anything from IndexError to struct.error
        reason = str(error) or type(error).__name__
        raise EnfoldError(f"'{path}' must be {what}, but it cannot be read ({reason}): {remedy}") from error


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
