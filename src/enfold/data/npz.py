"""NumPy archives: the four arrays of Keras, or inputs and labels to be split."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from enfold.data.arrays import as_split
from enfold.data.dataset import Split
from enfold.data.parts import Parts
from enfold.data.raw import require_memory, require_plausible
from enfold.errors import EnfoldError
from enfold.io.files import parsing

PARTS = ("train", "validation", "val", "test")
NAMES = {"inputs", "labels", "names", *(f"{axis}_{part}" for part in PARTS for axis in "xy")}
Arrays = dict[str, np.ndarray[Any, Any]]


def read_npz(path: Path) -> Parts:
    """Read the splits of an .npz file, without pickle.

    Args:
        path: The file, with the arrays x_train, y_train, x_test and y_test of Keras and optionally x_validation and
            y_validation (or x_val and y_val), or with the arrays inputs and labels. An array `names` of strings may
            contain the names of the classes.

    Returns:
        The splits.

    Raises:
        EnfoldError: If the file is damaged or lacks arrays.
    """
    arrays = _read_arrays(path)
    train = _pair(arrays, "train", path) or _pair(arrays, "", path)
    if train is None:
        raise EnfoldError(
            f"{path} must have the arrays x_train, y_train, x_test and y_test, or inputs and labels, got "
            f"{', '.join(arrays) or 'no arrays'}: save it with these names"
        )
    validation = _pair(arrays, "validation", path) or _pair(arrays, "val", path)
    test = _pair(arrays, "test", path)
    with parsing(path, "an .npz file with texts as names", "save the names with numpy.array(names)"):
        names = tuple(str(name) for name in np.atleast_1d(arrays["names"])) if "names" in arrays else ()
    num_classes = len(names) or max(train.labels.tolist(), default=0) + 1
    return Parts(train, validation, test, num_classes, f"{path.name} from {path.parent.resolve()}", names)


def _read_arrays(path: Path) -> Arrays:
    """Return the arrays with known names; others are not read."""
    with (
        parsing(path, "a complete .npz file of plain arrays", "save numbers with numpy.savez_compressed"),
        zipfile.ZipFile(path) as archive,
    ):
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        known = [name for name in entries if name in NAMES]
        return {name: _read_array(archive, entries[name], path) for name in known} or dict.fromkeys(
            entries, np.empty(0)
        )


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> np.ndarray[Any, Any]:
    """Return one array, after checking its header against the size of the entry."""
    require_plausible(path, entry.compress_size, entry.file_size)
    require_memory(entry.file_size, f"'{entry.filename}' of {path}", "save fewer examples, or smaller ones")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject or not dtype.itemsize or math.prod(shape) * dtype.itemsize != entry.file_size - file.tell():
            raise ValueError(f"'{entry.filename}' contains objects, or its size differs from its header")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


def _pair(arrays: Arrays, part: str, path: Path) -> Split | None:
    inputs, labels = (f"x_{part}", f"y_{part}") if part else ("inputs", "labels")
    if inputs not in arrays and labels not in arrays:
        return None
    if inputs not in arrays or labels not in arrays:
        missing, there = (labels, inputs) if inputs in arrays else (inputs, labels)
        raise EnfoldError(f"{path} must have {missing} as well as {there}, got {', '.join(arrays)}: save both")
    return as_split(arrays[inputs], arrays[labels], f"{inputs} and {labels} of {path}")
