"""Folders of images: one subfolder per class, optionally below train, validation and test; ImageNet, TinyImageNet."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from enfold.data.dataset import Split
from enfold.data.imagenet import ImageNetFiles, find_imagenet
from enfold.data.parts import Parts
from enfold.data.raw import require_memory
from enfold.errors import EnfoldError, MissingExtra

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
)  # the formats of Pillow that are usual for data sets
PARTS = {"train": "train", "validation": "val", "val": "val", "test": "test"}
GREY = frozenset({"1", "L", "LA"})
DEEP = frozenset({"I", "I;16", "I;16B", "I;16L", "F"})  # Pillow would clip these to 255 silently
Size = tuple[int, int]  # height, width


def read_folder(folder: Path, size: int | Size | None = None) -> Parts:
    """Read the images of a folder: grey if all of them are grey, else RGB.

    Args:
        folder: Folder with one subfolder per class, or with train, validation and test folders of such subfolders; or
            ImageNet or TinyImageNet as they are distributed (`enfold.data.imagenet`).
        size: Resize images to this size, a number or (height, width); by default they must all have the same size.

    Returns:
        The splits.

    Raises:
        EnfoldError: If the layout is wrong, an image is unreadable or sizes differ.
    """
    official = find_imagenet(folder)
    if official is not None:
        return _read_imagenet(folder, official, size)
    parts = _part_folders(folder)
    names = tuple(sorted(path.name for path in _subfolders(parts["train"])))
    files = {part: _files(path, names) for part, path in parts.items()}
    every = [path for listed in files.values() for path, _ in listed]
    shape, mode = _common_form(every, _as_size(size))
    splits = {part: _read_split(listed, shape, mode) for part, listed in files.items()}
    source = f"{folder.resolve().name} from {folder.resolve().parent}"
    return Parts(splits["train"], splits.get("val"), splits.get("test"), len(names), source, names)


def _as_size(size: int | Size | None) -> Size | None:
    return (size, size) if isinstance(size, int) else size


def _read_imagenet(folder: Path, files: ImageNetFiles, size: int | Size | None) -> Parts:
    """Read ImageNet or TinyImageNet; the official validation images are the test split."""
    shape, _ = _common_form([path for listed in (files.train, files.test) for path, _ in listed], _as_size(size))
    train, test = (_read_split(listed, shape, "RGB") for listed in (files.train, files.test))
    source = f"{folder.resolve().name} from {folder.resolve().parent}"
    return Parts(train, None, test, len(files.names), source, files.names)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _part_folders(folder: Path) -> dict[str, Path]:
    found = _subfolders(folder)
    names = {path.name for path in found}
    # Only if all of them are splits: "train" next to "car" and "plane" is a class.
    parts = (
        {PARTS[path.name]: path for path in found} if "train" in names and names <= PARTS.keys() else {"train": folder}
    )
    if len(_subfolders(parts["train"])) < 2:
        raise EnfoldError(
            f"{parts['train']} must have one subfolder of images for each of at least two classes, got "
            f"{len(_subfolders(parts['train']))} subfolders: sort the images into subfolders named by class"
        )
    return parts


def _files(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    listed: list[tuple[Path, int]] = []
    for subfolder in sorted(_subfolders(folder)):
        if subfolder.name not in names:
            raise EnfoldError(
                f"every class must be in the training split, got '{subfolder.name}' only in {folder}: "
                "rename or remove that subfolder"
            )
        images = sorted(path for path in subfolder.iterdir() if path.suffix.lower() in SUFFIXES)
        if not images:
            raise EnfoldError(
                f"every class subfolder must contain images ({', '.join(sorted(SUFFIXES))}), got none in {subfolder}: "
                "add images or remove the subfolder"
            )
        listed += [(path, names.index(subfolder.name)) for path in images]
    return listed


def _common_form(paths: list[Path], size: Size | None) -> tuple[Size, str]:
    """Return size and mode of all images, read from their headers."""
    mode, shape, first = "L", size, paths[0]
    for path in paths:
        with _open(path) as image:
            if image.mode in DEEP:
                raise EnfoldError(
                    f"images must have 8 bits per channel, got mode {image.mode} in {path}: convert them to 8 bits, or "
                    "save the data as floats in an .npz file"
                )
            mode = mode if image.mode in GREY else "RGB"
            found = (image.height, image.width)
        shape = shape or found
        if size is None and found != shape:
            raise EnfoldError(
                f"images must have the same size, got {found[0]} x {found[1]} in {path} and {shape[0]} x {shape[1]} in "
                f"{first}: pass size= to resize them, for example size=32"
            )
    assert shape is not None  # noqa: S101  (there is at least one image)
    return shape, mode


def _read_split(listed: list[tuple[Path, int]], shape: Size, mode: str) -> Split:
    channels = 1 if mode == "L" else 3
    require_memory(len(listed) * channels * shape[0] * shape[1], "a folder of images", "pass size=, for example 32")
    inputs = torch.empty((len(listed), channels, *shape), dtype=torch.uint8)
    for index, (path, _) in enumerate(listed):
        with _open(path) as image:
            inputs[index] = _pixels(image, path, shape, mode)
    return Split(inputs, torch.tensor([label for _, label in listed]))


def _pixels(image: Image.Image, path: Path, shape: Size, mode: str) -> torch.Tensor:
    try:
        converted = image.convert(mode)
    except Exception as error:  # Pillow's readers raise anything for a damaged file
        raise _unreadable(path, error) from error
    if (converted.height, converted.width) != shape:
        converted = converted.resize((shape[1], shape[0]), resample=2)  # bilinear with antialiasing
    array = np.array(converted, dtype=np.uint8).reshape(*shape, -1)
    return torch.from_numpy(array).permute(2, 0, 1)


def _open(path: Path) -> Image.Image:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "data", "reading a folder of images") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(path)
    except Exception as error:  # Pillow's readers raise anything for a damaged file
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> EnfoldError:
    return EnfoldError(f"images must be readable, got {path} ({error}): replace or remove that file")
