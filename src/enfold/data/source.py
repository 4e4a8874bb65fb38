"""What every data set with a name can do: be found, fetched, read and checked."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from enfold.data.parts import Parts
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Source(ABC):
    """A data set with a name."""

    name: str
    description: str
    licence: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]  # train, validation, test, as `load` gives them by default

    @abstractmethod
    def find(self, root: Path | None) -> Path | None:
        """Where the files lie, or None; nothing is written and nothing is downloaded."""

    @abstractmethod
    def absence(self, root: Path | None) -> str:
        """The sentence for files that are not there, with what to do."""

    def fetch(self, root: Path | None) -> Path:
        """Make sure that the files are there and say where."""
        path = self.find(root)
        if path is None:
            raise EnfoldError(self.absence(root))
        return path

    @abstractmethod
    def read(self, path: Path) -> Parts:
        """The parts, from where the files lie."""

    @abstractmethod
    def problems(self, path: Path) -> list[str]:
        """What is wrong with the files, a sentence each."""

    @abstractmethod
    def bytes(self, path: Path | None) -> int:
        """Space of the files on disk or, if they are missing, size of the download."""


def roots(root: Path | None = None) -> list[Path]:
    """Folders that are searched for data, in this order; downloads go to the first."""
    if root is not None:
        return [root.expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enfold"
    own = os.environ.get("ENFOLD_DATA")
    return [Path(own).expanduser(), cache] if own else [cache]
