"""ImageNet and TinyImageNet in the folders in which they are distributed.

    tiny        train/WNID/images/*.JPEG   val/images/*.JPEG with val/val_annotations.txt   words.txt            (1)
    ILSVRC      .../CLS-LOC/train/WNID/*.JPEG   .../CLS-LOC/val/*.JPEG with LOC_val_solution.csv                   (2)
    by class    train/WNID/*.JPEG   val/WNID/*.JPEG                                                                (3)

A WNID is "n" and eight digits. The official validation images are the test split, as in the literature, because the
labels of the official test images are not public; validation examples are taken from the training images. (2) is the
archive of Kaggle, and (3) what the usual scripts make of the official archives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from enfold.errors import EnfoldError

WNID = re.compile(r"n\d{8}")
SUFFIXES = frozenset({".jpeg", ".jpg", ".png"})
LARGEST = 64 * 2**20  # bytes of a text file; the largest official one has 18 MB
ANNOTATIONS = Path("val") / "val_annotations.txt"
SOLUTION = "LOC_val_solution.csv"
NESTED = (Path("ILSVRC") / "Data" / "CLS-LOC", Path("Data") / "CLS-LOC")
WORDS = ("words.txt", "LOC_synset_mapping.txt")
Listed = list[tuple[Path, int]]  # files and class indices


class ImageNetFiles:
    """The files of one of the layouts.

    Args:
        names: The names of the classes.
        train: Training images and their classes.
        test: Official validation images and their classes.
    """

    def __init__(self, names: tuple[str, ...], train: Listed, test: Listed) -> None:
        self.names, self.train, self.test = names, train, test


def find_imagenet(folder: Path) -> ImageNetFiles | None:
    """Return the files of a folder with one of the layouts (1) to (3), or None for another folder.

    Args:
        folder: The folder.

    Raises:
        EnfoldError: If a label is missing or a file of labels is damaged.
    """
    nested = next((folder / each for each in NESTED if (folder / each / "train").is_dir()), None)
    if (folder / ANNOTATIONS).is_file():
        root, labels, images = folder, _annotations(folder / ANNOTATIONS), folder / "val" / "images"
    elif nested is not None and (folder / SOLUTION).is_file():
        root, labels, images = nested, _solution(folder / SOLUTION), nested / "val"
    elif _is_by_class(folder):
        return _by_class(folder)
    else:
        return None
    wnids = _classes(root / "train")
    index = {wnid: number for number, wnid in enumerate(wnids)}
    train = [(file, index[wnid]) for wnid in wnids for file in _training_images(root / "train" / wnid)]
    return ImageNetFiles(_names(folder, wnids), train, list(_label_images(images, labels, index)))


def _is_by_class(folder: Path) -> bool:
    parts = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if parts != {"train", "val"}:
        return False
    return all(WNID.fullmatch(path.name) for part in parts for path in (folder / part).iterdir() if path.is_dir())


def _by_class(folder: Path) -> ImageNetFiles:
    wnids = _classes(folder / "train")
    index = {wnid: number for number, wnid in enumerate(wnids)}
    found: dict[str, Listed] = {"train": [], "val": []}
    for part, listed in found.items():
        for path in sorted(each for each in (folder / part).iterdir() if each.is_dir()):
            if path.name not in index:
                raise EnfoldError(
                    f"every class must be in the training split, got '{path.name}' only in {folder / part}: rename or "
                    "remove that subfolder"
                )
            listed += [(file, index[path.name]) for file in _training_images(path)]
    return ImageNetFiles(_names(folder, wnids), found["train"], found["val"])


def _classes(train: Path) -> list[str]:
    wnids = sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith("."))
    wrong = next((name for name in wnids if not WNID.fullmatch(name)), None)
    if wrong is not None or len(wnids) < 2:
        given = f"'{wrong}'" if wrong is not None else f"{len(wnids)} of them"
        raise EnfoldError(
            f"{train} must have at least two subfolders named like n01440764, got {given}: restore the official names"
        )
    return wnids


def _training_images(folder: Path) -> list[Path]:
    inner = folder / "images"
    place = inner if inner.is_dir() else folder
    images = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
    if not images:
        raise EnfoldError(f"every class must have images, got none in {place}: restore them, or remove the subfolder")
    return images


def _label_images(images: Path, labels: dict[str, str], index: dict[str, int]) -> Iterator[tuple[Path, int]]:
    """Yield the images of a flat folder with their classes; all of them must have a label."""
    if not images.is_dir():
        raise EnfoldError(f"the validation images must be in {images}, which is not there: extract the archive again")
    for file in sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES):
        wnid = labels.get(file.name) or labels.get(file.stem)
        if wnid is None:
            raise EnfoldError(f"every validation image must have a label, got none for {file}: restore the labels")
        if wnid not in index:
            raise EnfoldError(
                f"every label must be a class of the training images, got '{wnid}' for {file}: restore the class"
            )
        yield file, index[wnid]


def _annotations(file: Path) -> dict[str, str]:
    """Return the class of each image of (1): lines with the image, the class and a box, separated by tabs."""
    found = {}
    for number, line in enumerate(_lines(file), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or not WNID.fullmatch(cells[1]):
            raise _odd_line(file, number, line, "an image and a class, separated by a tab")
        found[cells[0]] = cells[1]
    return found


def _solution(file: Path) -> dict[str, str]:
    """Return the class of each image of (2): lines with the image, a comma, and the class with boxes."""
    found = {}
    for number, line in enumerate(_lines(file), start=1):
        image, comma, boxes = line.partition(",")
        wnid = boxes.partition(" ")[0]
        if number == 1 and not WNID.match(boxes):
            continue  # the header
        if not comma or not WNID.fullmatch(wnid):
            raise _odd_line(file, number, line, "an image, a comma and a class")
        found[image] = wnid
    return found


def _names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    """Return the words of the classes where they are known, else the WNIDs."""
    words: dict[str, str] = {}
    for name in WORDS:
        if (folder / name).is_file():
            pairs = (re.split(r"[\t ]", line, maxsplit=1) for line in _lines(folder / name))
            words |= {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2 and pair[1].strip()}
    names = [words.get(wnid, wnid).partition(",")[0] for wnid in wnids]
    return tuple(names if len(set(names)) == len(names) else wnids)  # "crane" is a bird and a machine


def _lines(file: Path) -> list[str]:
    size = file.stat().st_size
    if size > LARGEST:
        raise EnfoldError(f"{file} must have at most {LARGEST // 2**20} MB, got {size // 2**20}: restore the file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EnfoldError(f"{file} must be a text in UTF-8, but it is not ({error}): restore the file") from error
    return [line for line in text.splitlines() if line.strip()]


def _odd_line(file: Path, number: int, line: str, wanted: str) -> EnfoldError:
    return EnfoldError(f"line {number} of {file} must be {wanted}, got {line[:80]!r}: restore the file")
