"""Data by name, path or user function, and the catalogue of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enfold.data.arrays import check_split
from enfold.data.convert import as_data
from enfold.data.dataset import Data, Split
from enfold.data.diabetes import DIABETES
from enfold.data.digits import DIGITS
from enfold.data.fashion_mini import FASHION_MINI
from enfold.data.folder import read_folder
from enfold.data.npz import read_npz
from enfold.data.official import CIFAR10, CIFAR100, FASHION_MNIST, MNIST
from enfold.data.parts import Parts, assemble, exclude_from_data, resplit_data
from enfold.data.source import Source
from enfold.errors import EnfoldError, closest
from enfold.io.usercode import call, find_path, resolve, searched_folders

SOURCES: dict[str, Source] = {
    source.name: source for source in (FASHION_MINI, DIGITS, DIABETES, FASHION_MNIST, MNIST, CIFAR10, CIFAR100)
}


PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Row:
    """One row of the catalogue."""

    name: str
    description: str
    licence: str
    classes: int
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]  # train, validation, test
    present: bool
    path: Path | None  # location of the files, if present
    bytes: int  # size of the files, or of the download


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
    """Load data with training, validation and test splits.

    If a source has no test split, a stratified fifth of its examples is used, the same for every seed.

    Args:
        name_or_path: A name of the `catalogue`, an .npz file, a folder of images, or a function as ``module:name``.
        val_size: Number or fraction of validation examples, a stratified subset of the training split; the default is
            the source's own validation split, or a tenth and at most 5,000.
        seed: Seed of the splits.
        train_size: Number or fraction of the remaining training examples to use, stratified; None for all.
        root: Folder of the files; the default is $ENFOLD_DATA and ~/.cache/enfold.
        download: Download missing files.
        size: Resize the images of a folder to this size, a number or (height, width).
        exclude_classes: Indices of classes to exclude from all splits, for example as out-of-distribution examples; the
            others are renumbered.

    Returns:
        The data.

    Raises:
        EnfoldError: If the data are not found or invalid, or an argument is out of range.
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
        return resplit_data(exclude_from_data(_call_user_function(name_or_path), exclude_classes), **chosen)
    if isinstance(name_or_path, Path) or path.suffix or len(path.parts) > 1:
        raise EnfoldError(
            f"'{path}' must be a file or folder in {searched_folders()}, but it is not found: correct the path"
        )
    raise _unknown(name_or_path)


def fetch(name: str, root: str | Path | None = None) -> Path:
    """Download missing files of a named data set and check them.

    Args:
        name: A name of the `catalogue`.
        root: Folder of the files; the default is $ENFOLD_DATA and ~/.cache/enfold.

    Returns:
        The location of the files.

    Raises:
        EnfoldError: If the name is unknown, the download fails or a checksum is wrong.
    """
    if name not in SOURCES:
        raise _unknown(name)
    source = SOURCES[name]
    path = source.fetch(_root(root))
    problems = source.problems(path)
    if problems:
        raise EnfoldError(problems[0])
    return path


def check(name_or_path: str, root: str | Path | None = None) -> list[str]:
    """Return a message for each problem of a data set, by checksum for named ones, else by reading the data.

    Args:
        name_or_path: A name of the `catalogue`, or a path.
        root: Folder of the files; the default is $ENFOLD_DATA and ~/.cache/enfold.
    """
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
    """Return all named data sets, and whether their files are present.

    Args:
        root: Folder of the files; the default is $ENFOLD_DATA and ~/.cache/enfold.
    """
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
            f"name_or_path must be a name, an .npz file, a folder of images or module:function, got the file '{path}': "
            "save it as .npz, or write a function that returns enfold.Data"
        )
    return read_npz(path)


def _call_user_function(reference: str) -> Data:
    make = resolve(reference)
    data = _as_data(reference, call(reference, make) if callable(make) else make)
    for name in ("train", "val", "test"):
        part = getattr(data, name)
        if isinstance(part, Split):
            check_split(part, data.num_classes, f"the {name} split of {reference}")
    return data if data.source != Data.source else data.replace(source=reference)


def _as_data(reference: str, made: Any) -> Data:
    """Return what the user's function returned: data, or training, validation and test examples of any kind."""
    if isinstance(made, Data):
        return made
    parts = made if isinstance(made, Mapping) else None
    if isinstance(made, tuple) and len(made) == len(PARTS):
        parts = dict(zip(PARTS, made, strict=True))
    if parts is None or not {*PARTS} <= parts.keys() <= {*PARTS, "unpack"}:
        raise EnfoldError(
            f"'{reference}' must be a function without arguments that returns enfold.Data, got "
            f"{type(made).__name__}: return Data(train, val, test, num_classes, shape), or (train, val, test), each a "
            "DataLoader, a Dataset or a pair (inputs, targets), or a dict of them with unpack="
        )
    return as_data(parts["train"], parts["val"], parts["test"], unpack=parts.get("unpack"))


def _root(root: str | Path | None) -> Path | None:
    return None if root is None else Path(root)


def _refuse_size(size: object, what: str) -> None:
    if size is not None:
        raise EnfoldError(f"size must be None except for folders of images, got size={size!r} for {what}: omit size")


def _unknown(name: str) -> EnfoldError:
    near = closest(name.lower(), SOURCES)
    hint = f"did you mean '{near}'?" if near else "correct the name, or pass a path"
    return EnfoldError(f"the name of a data set must be one of {', '.join(SOURCES)}, got '{name}': {hint}")
