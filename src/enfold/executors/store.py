"""Store: files that are complete or absent, in a local folder or at an fsspec address such as s3://bucket/run."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError, MissingExtra
from enfold.io.files import atomic_path, writing


class Store:
    """A flat collection of files by name. Each is written aside and renamed, so that a reader never sees half a file.

    Args:
        address: A folder, or an address that fsspec opens, with ``://``. It must be the same place for all workers.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)

    def __repr__(self) -> str:
        return f"Store({self.address!r})"

    @property
    def folder(self) -> Path | None:
        """The local folder; None for an address of fsspec."""
        return None if "://" in self.address else Path(self.address)

    def exists(self, name: str) -> bool:
        """Return whether a file is complete."""
        if self.folder is not None:
            return (self.folder / name).is_file()
        system, root = self._open()
        system.invalidate_cache()
        return bool(system.isfile(f"{root}/{name}"))

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """Yield a local path with the content of a file; that of an address is a copy, which is removed afterwards."""
        if self.folder is not None:
            yield self.folder / name
            return
        system, root = self._open()
        with tempfile.TemporaryDirectory(prefix="enfold-") as place:
            system.get_file(f"{root}/{name}", f"{place}/{name}")
            yield Path(place) / name

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yield a temporary path; its content becomes the file if the block succeeds."""
        if self.folder is not None:
            with atomic_path(self.folder / name) as path:
                yield path
            return
        with tempfile.TemporaryDirectory(prefix="enfold-") as place:
            yield Path(place) / name
            self.upload(Path(place) / name, name)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file to an address, aside first."""
        system, root = self._open()
        aside = f"{root}/.{name}.{secrets.token_hex(4)}.part"
        with writing(Path(f"{self.address}/{name}")):
            system.makedirs(root, exist_ok=True)
            system.put_file(str(path), aside)
            system.mv(aside, f"{root}/{name}")

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)
        elif self.exists(name):
            system, root = self._open()
            system.rm_file(f"{root}/{name}")

    def _open(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtra("fsspec", "ray", f"the store '{self.address}'") from error
        try:
            system, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise EnfoldError(
                f"store must be a folder or an address that fsspec opens, got '{self.address}' ({error}): install the "
                "package of its protocol, or correct the address"
            ) from error
        return system, root
