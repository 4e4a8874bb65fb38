"""The interface of named data sets: find, fetch, read and check."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from enfold.data.parts import Parts
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Source(ABC):
    """A named data set."""

    name: str
    description: str
    licence: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]  # train, validation and test, with the defaults of `load`

    @abstractmethod
    def find(self, root: Path | None) -> Path | None:
        """Return the location of the files, or None; nothing is written or downloaded."""

    @abstractmethod
    def absence(self, root: Path | None) -> str:
        """Return the message about missing files, with the remedy."""

    def fetch(self, root: Path | None) -> Path:
        """Return the location of the files, after downloading missing ones if possible.

        Raises:
            EnfoldError: If files are missing.
        """
        path = self.find(root)
        if path is None:
            raise EnfoldError(self.absence(root))
        return path

    @abstractmethod
    def read(self, path: Path) -> Parts:
        """Return the splits from the location of the files."""

    @abstractmethod
    def problems(self, path: Path) -> list[str]:
        """Return a message for each problem with the files."""

    @abstractmethod
    def bytes(self, path: Path | None) -> int:
        """Return the size of the files or, if they are missing, of the download."""


def roots(root: Path | None = None) -> list[Path]:
    """Return the folders that are searched for data, in this order; downloads go to the first."""
    if root is not None:
        return [root.expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enfold"
    own = os.environ.get("ENFOLD_DATA")
    return [Path(own).expanduser(), cache] if own else [cache]
