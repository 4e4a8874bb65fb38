"""Checkpoints by path, pattern, folder or list."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path

from enfold.errors import EnfoldError
from enfold.io.layouts import is_member, members_of, natural
from enfold.io.usercode import places, searched_folders

MOST = 100_000  # directory entries that a pattern may visit


def matching_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the checkpoints that match a pattern, sorted by name, those of a folder, or those of a list of these.

    A checkpoint is a file, or a folder in a layout of `enfold.io.layouts`. A pattern that matches files does not match
    folders.

    Args:
        files: A path, a glob pattern, or a list of these, in the order of the list.

    Raises:
        EnfoldError: If a path does not exist, a folder has no checkpoint, or nothing matches the pattern.
    """
    if isinstance(files, str | Path):
        for place in places():
            found = _match_pattern(place, str(files))
            if found:
                return found
        raise EnfoldError(
            f"files must match at least one checkpoint, got '{files}' without a match in {searched_folders()}: "
            "check the path"
        )
    missing = [name for name in files if not Path(name).exists() and not glob.has_magic(str(name))]
    if missing or not files:
        what = f"'{missing[0]}', which does not exist" if missing else "an empty list"
        raise EnfoldError(f"files must be existing checkpoints, got {what}: check the path")
    return [found for name in files for found in matching_files(name)]


def _match_pattern(place: Path, files: str) -> list[Path]:
    path = place / files
    if path.is_file():  # a file name may contain brackets
        return [path]
    if path.is_dir():
        return members_of(path)
    if not glob.has_magic(files):
        return []
    parts = list(Path(files).parts)
    found = set(_search(place, parts, count(), Path.is_file)) or set(_search(place, parts, count(), _is_folder))
    return sorted(found, key=natural)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and is_member(path)


def require_local(pattern: str) -> None:
    """Check that a recipe's pattern does not search folders elsewhere, as recipes may be untrusted.

    Raises:
        EnfoldError: If a folder outside the current one contains wildcards.
    """
    path = Path(pattern)
    if (path.is_absolute() or ".." in path.parts) and glob.has_magic(str(path.parent)):
        raise EnfoldError(
            "a checkpoint pattern with wildcards in its folders must be below the recipe's or the current folder, got "
            f"'{pattern}': write the folder without wildcards, or run from a folder above it"
        )


def _search(folder: Path, parts: list[str], seen: Iterator[int], is_found: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield what is below a folder and matches the components of a pattern; limit the number of visited entries."""
    if not glob.has_magic(parts[0]):
        inner = folder / parts[0]
        if parts[1:] and inner.is_dir():
            yield from _search(inner, parts[1:], seen, is_found)
        elif not parts[1:] and is_found(inner):
            yield inner
        return
    anywhere, last = parts[0] == "**", not parts[1:]
    if anywhere and not last:
        yield from _search(folder, parts[1:], seen, is_found)
    for entry in _entries(folder):
        if next(seen) > MOST:
            raise EnfoldError(
                f"a checkpoint pattern must visit at most {MOST:,} files, got more below '{folder}': use a more "
                "specific pattern"
            )
        hidden = entry.name.startswith(".") and not parts[0].startswith(".")
        if hidden or not (anywhere or fnmatchcase(entry.name, parts[0])):
            continue
        if last and is_found(Path(entry.path)):
            yield Path(entry.path)
        if entry.is_dir(follow_symlinks=not anywhere) and (anywhere or not last):
            yield from _search(Path(entry.path), parts if anywhere else parts[1:], seen, is_found)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # no permission
        return []
