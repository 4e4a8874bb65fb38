"""Atomic writes (temporary file, fsync, rename), digests and read errors."""

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

CHUNK = 1 << 24  # bytes hashed at a time
LONGEST = 300  # characters of a reader's own message, which may quote the file


@contextmanager
def atomic_path(path: Path, *, parents: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; it replaces `path` if the block succeeds, else it is removed.

    Args:
        path: The file to write. Its folder is created if it is missing.
        parents: Create the parents of the folder as well.

    Raises:
        WriteError: If the file cannot be written.
    """
    with writing(path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=parents, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with _in_use(path.parent) as sync:
            try:
                yield temporary
                with temporary.open("r+b") as written:  # Windows syncs only writable files
                    os.fsync(written.fileno())
                temporary.chmod(0o666 & ~_umask())  # safetensors writes files that only the owner can read
                temporary.replace(path)  # replaces a symbolic link itself, not its target
                sync()
            finally:
                temporary.unlink(missing_ok=True)


@cache
def _umask() -> int:
    """Return the umask of the process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert system errors inside the block to a `WriteError` about `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(path, error) from error


@contextmanager
def _in_use(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a folder so that its temporary files are not considered stale; yield a function that syncs it."""
    if os.name != "posix":
        yield lambda: None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, exclusive=False)
        yield lambda: os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file without waiting; return False if another process has it or locks are not available."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
    except (ImportError, OSError):
        return False
    return True


def remove_stale_parts(folder: Path) -> None:
    """Remove temporary files of killed processes in a folder and its subfolders."""
    for place in {part.parent for part in folder.rglob(".*.part")}:
        with suppress(OSError):  # already removed, or no permission: stale files are harmless
            descriptor = os.open(place, os.O_RDONLY)
            try:
                for part in place.glob(".*.part") if _lock(descriptor, exclusive=True) else ():
                    part.unlink()
            finally:
                os.close(descriptor)


def open_no_follow(name: str, flags: int) -> int:
    """Open a file, but do not follow a symbolic link: an `opener` for files that are written in place."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file; an incomplete last line of an interrupted write is terminated first.

    Raises:
        WriteError: If the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with open(path, "a+b", opener=open_no_follow) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert system errors inside the block to an `EnfoldError` about a file that is missing or cannot be read."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a decompressor
            raise
        raise EnfoldError(
            f"'{path}' must be a readable file, but it is not ({os.strerror(error.errno)}): check the path"
        ) from error


@contextmanager
def parsing(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Convert errors of a reader inside the block to an `EnfoldError` about a damaged file.

    Args:
        path: The file.
        what: What it should be, such as "a safetensors file".
        remedy: What the user can do.
    """
    try:
        yield
    except EnfoldError:
        raise
    except Exception as error:  # readers raise anything from IndexError to struct.error
        reason = " ".join((str(error) or type(error).__name__).split())
        reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}..."
        raise EnfoldError(f"'{path}' must be {what}, but it cannot be read ({reason}): {remedy}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically; keys are in the given order."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(tensors: Iterable[Tensor], text: str = "") -> str:
    """Return a hexadecimal SHA-256 of tensors (types, shapes and values) and a text."""
    import torch

    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        rows = max(1, CHUNK // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
        for piece in tensor.detach().split(rows) if tensor.ndim else [tensor.detach()]:  # limits the memory of the copy
            flat = piece.cpu().flatten().clone(memory_format=torch.contiguous_format)
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def part_file(file: Path, part: object) -> Path:
    """Return the path of a partial result next to a file: "name-part.suffix"."""
    return file.with_name(f"{file.stem}-{part}{file.suffix}")
