"""Data by name, by path or by the user's own function, and the catalogue of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enfold.data.arrays import check_split
from enfold.data.dataset import Data, Split
from enfold.data.digits import DIGITS
from enfold.data.fashion_mini import FASHION_MINI
from enfold.data.folder import read_folder
from enfold.data.npz import read_npz
from enfold.data.official import CIFAR10, CIFAR100, FASHION_MNIST, MNIST
from enfold.data.parts import Parts, assemble, resplit_data, without
from enfold.data.source import Source
from enfold.errors import EnfoldError, closest
from enfold.io.usercode import call, find_path, resolve, searched_folders

SOURCES: dict[str, Source] = {
    source.name: source for source in (FASHION_MINI, DIGITS, FASHION_MNIST, MNIST, CIFAR10, CIFAR100)
}


@dataclass(frozen=True)
class Row:
    """One line of the catalogue."""

    name: str
    description: str
    licence: str
    classes: int
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]  # train, validation, test
    present: bool
    path: Path | None  # where it lies, if it does
    bytes: int  # on disk, or of the download


def load(
    name_or_path: str | Path,
    *,
    val_size: int | float | None = None,
    seed: int = 0,
    train_size: int | float | None = None,
    root: str | Path | None = None,
    download: bool = True,
    size: int | tuple[int, int] | None = None,
    exclude_classes: Sequence[int] = (),
) -> Data:
    """Data by name (see `catalogue`), from an .npz file, a folder of images, or a function as ``module:name``.

    Validation is split off the training part, stratified and by `seed`: a number of examples or a fraction, by default
    a tenth and at most 5,000, or the source's own validation part. `train_size` keeps a stratified part of what is left
    to train on. A test part that a source lacks is a fifth of its examples, the same for every seed. Files are looked
    for under `root`, or $ENFOLD_DATA and ~/.cache/enfold, and downloaded if they are missing unless ``download=False``.
    `size` brings the images of a folder to one size. `exclude_classes` are left out of all parts and the others
    numbered anew: what was left out can be shown to a network that never saw its like.
    """
    chosen: Any = {"val_size": val_size, "seed": seed, "train_size": train_size}
    if isinstance(name_or_path, str) and name_or_path in SOURCES:
        _refuse_size(size, name_or_path)
        source, place = SOURCES[name_or_path], _root(root)
        path = source.fetch(place) if download else source.find(place)
        if path is None:
            raise EnfoldError(source.absence(place))
        return assemble(source.read(path), **chosen, exclude_classes=exclude_classes)
    path = find_path(Path(name_or_path).expanduser())
    if path.exists():
        return assemble(_read_path(path, size), **chosen, exclude_classes=exclude_classes)
    if isinstance(name_or_path, str) and ":" in name_or_path:
        _refuse_size(size, name_or_path)
        return resplit_data(without(_own(name_or_path), exclude_classes), **chosen)
    if isinstance(name_or_path, Path) or path.suffix or len(path.parts) > 1:
        raise EnfoldError(
            f"'{path}' must be a file or folder in {searched_folders()}, but it is not found: correct the path"
        )
    raise _unknown(name_or_path)


def fetch(name: str, root: str | Path | None = None) -> Path:
    """Download what is missing of a data set with a name, check it, and say where it lies."""
    if name not in SOURCES:
        raise _unknown(name)
    source = SOURCES[name]
    path = source.fetch(_root(root))
    problems = source.problems(path)
    if problems:
        raise EnfoldError(problems[0])
    return path


def check(name_or_path: str, root: str | Path | None = None) -> list[str]:
    """What is wrong with a data set, a sentence each: by checksum if it has a name, else by reading it."""
    if name_or_path not in SOURCES:
        try:
            load(name_or_path, root=root)
        except EnfoldError as error:
            return [str(error)]
        return []
    source, place = SOURCES[name_or_path], _root(root)
    path = source.find(place)
    return [source.absence(place)] if path is None else source.problems(path)


def catalogue(root: str | Path | None = None) -> list[Row]:
    """All data sets with a name, and whether they are on this computer."""
    rows = []
    for source in SOURCES.values():
        path = source.find(_root(root))
        rows.append(
            Row(
                source.name,
                source.description,
                source.licence,
                len(source.classes),
                source.shape,
                source.sizes,
                path is not None,
                path,
                source.bytes(path),
            )
        )
    return rows


def _read_path(path: Path, size: int | tuple[int, int] | None) -> Parts:
    if path.is_dir():
        return read_folder(path, size)
    _refuse_size(size, str(path))
    if path.suffix != ".npz":
        raise EnfoldError(
            f"data must be a name, an .npz file, a folder of images or module:function, got the file '{path}': "
            "save it as .npz, or write a function that returns enfold.Data"
        )
    return read_npz(path)


def _own(reference: str) -> Data:
    make = resolve(reference)
    data = call(reference, make) if callable(make) else make
    if not isinstance(data, Data):
        raise EnfoldError(
            f"'{reference}' must be a function without arguments that returns enfold.Data, got "
            f"{type(data).__name__}: build one with Data(train, val, test, num_classes, shape)"
        )
    for name in ("train", "val", "test"):
        part = getattr(data, name)
        if isinstance(part, Split):
            check_split(part, data.known_classes(), f"the {name} part of {reference}")
    return data if data.source != Data.source else data.replace(source=reference)


def _root(root: str | Path | None) -> Path | None:
    return None if root is None else Path(root)


def _refuse_size(size: object, what: str) -> None:
    if size is not None:
        raise EnfoldError(
            f"size= is for folders of images only, got size={size!r} for {what}: leave it out, or resize yourself"
        )


def _unknown(name: str) -> EnfoldError:
    near = closest(name.lower(), SOURCES)
    hint = f"did you mean '{near}'?" if near else "correct the name, or give a path"
    return EnfoldError(f"a data set must have one of the names {', '.join(SOURCES)}, got '{name}': {hint}")
