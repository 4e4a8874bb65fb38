"""NumPy archives of the user's own: Keras's four arrays, or inputs and labels to be split."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from enfold.data.arrays import as_split
from enfold.data.dataset import Split
from enfold.data.parts import Parts
from enfold.errors import EnfoldError

Arrays = dict[str, np.ndarray[Any, Any]]


def read_npz(path: Path) -> Parts:
    """The parts of an .npz file; an array `names` of strings may name the classes, and no pickle is ever opened.

    x_train and y_train, x_test and y_test as Keras saves them, x_validation and y_validation (or x_val and y_val) if
    there are any; or inputs and labels.
    """
    arrays = _arrays(path)
    train = _pair(arrays, "train", path) or _pair(arrays, "", path)
    if train is None:
        raise EnfoldError(
            f"{path} must hold x_train, y_train, x_test and y_test, or inputs and labels, got "
            f"{', '.join(arrays) or 'no arrays'}: save it again under these names"
        )
    validation = _pair(arrays, "validation", path) or _pair(arrays, "val", path)
    test = _pair(arrays, "test", path)
    names = tuple(str(name) for name in arrays["names"]) if "names" in arrays else ()
    num_classes = len(names) or max(train.labels.tolist(), default=0) + 1
    return Parts(train, validation, test, num_classes, f"{path.name} from {path.parent.resolve()}", names)


def _arrays(path: Path) -> Arrays:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise EnfoldError(
            f"{path} must be a whole .npz file of plain arrays, got one that NumPy cannot read without unpickling "
            f"({error}): save numbers with numpy.savez_compressed"
        ) from error


def _pair(arrays: Arrays, part: str, path: Path) -> Split | None:
    inputs, labels = (f"x_{part}", f"y_{part}") if part else ("inputs", "labels")
    if inputs not in arrays and labels not in arrays:
        return None
    if inputs not in arrays or labels not in arrays:
        missing, there = (labels, inputs) if inputs in arrays else (inputs, labels)
        raise EnfoldError(f"{path} must hold {missing} beside {there}, got {', '.join(arrays)}: save both")
    return as_split(arrays[inputs], arrays[labels], f"{inputs} and {labels} of {path}")
