"""Convert what users have (loaders, datasets, tensors, arrays) to `Data`, and refuse everything else at the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from enfold.data.arrays import as_inputs, as_labels
from enfold.data.dataset import Data, Part, Split
from enfold.errors import EnfoldError

Examples = Data | Part | Dataset[Any] | tuple[Any, Any]
"""Accepted by `fit`, `distill`, `merge` and `evaluate`: a DataLoader or another iterable of (inputs, labels) batches, a
Dataset, a pair (inputs, labels) of tensors or numpy arrays, a `Split`, or a built-in data set."""

EMPTY: list[Any] = []
ACCEPTED = "a DataLoader, a Dataset, a pair (inputs, labels) of tensors or arrays, or a data set of enfold.data.load"


def as_data(
    train: Examples | None = None, val: Examples | None = None, test: Examples | None = None, *, batch_size: int = 128
) -> Data:
    """Convert training, validation and test examples to one `Data`.

    Args:
        train: Training examples, or a built-in data set, whose other splits are used where `val` or `test` is None.
        val: Validation examples; None for none.
        test: Test examples; None for none.
        batch_size: Batch size for a Dataset, which is wrapped in a DataLoader.

    Returns:
        The splits, with the shape of the inputs inferred from one batch.

    Raises:
        EnfoldError: If an argument is of another kind, or its batches are not pairs of tensors.
    """
    given: dict[str, Any] = {"val": val, "test": test}
    if isinstance(train, Data):
        changes = {name: as_split(each, name, batch_size) for name, each in given.items() if each is not None}
        return train.replace(**changes) if changes else train
    splits: dict[str, Any] = {
        name: EMPTY if each is None else as_split(each, name, batch_size) for name, each in given.items()
    }
    splits["train"] = EMPTY if train is None else as_split(train, "train", batch_size)
    shape = next((_shape(splits[name]) for name in ("train", "val", "test") if splits[name] is not EMPTY), ())
    return Data(**splits, num_classes=None, shape=shape)


def require(examples: object, name: str, needed_by: str) -> None:
    """Raise an error that names the argument if required examples are None."""
    if examples is None:
        raise EnfoldError(f"{needed_by} needs {name} examples, got {name}=None: pass {ACCEPTED}")


def as_split(examples: Any, name: str, batch_size: int = 128) -> Part:
    """Convert one argument to tensors in memory or to an iterable of batches.

    Args:
        examples: What the user passed.
        name: Its name in error messages: "train", "val" or "test".
        batch_size: Batch size for a Dataset.

    Returns:
        A `Split` for tensors and arrays, otherwise a loader.

    Raises:
        EnfoldError: If it is of another kind, or its first batch is not a pair (inputs, labels) of tensors.
    """
    if isinstance(examples, Data):
        chosen: Part = getattr(examples, name)
        return chosen
    if isinstance(examples, Split):
        return examples
    if isinstance(examples, TensorDataset):
        examples = examples.tensors
    if _is_pair(examples):
        return _pair(examples, name)
    if isinstance(examples, Dataset):
        shuffle = name == "train" and not isinstance(examples, IterableDataset)
        examples = DataLoader(examples, batch_size=batch_size, shuffle=shuffle)
    if hasattr(examples, "iloc") or isinstance(examples, str | bytes | dict | Tensor | np.ndarray):
        raise EnfoldError(_refusal(examples, name))
    if not isinstance(examples, Iterable):
        raise EnfoldError(_refusal(examples, name))
    if not isinstance(examples, Iterator):  # reading from a generator would lose the batch
        _check_batch(_first_batch(examples), name)
    return examples


def _is_pair(examples: Any) -> bool:
    """Return whether this is a sequence of tensors, arrays or table columns, and not of batches."""
    columns = (Tensor, np.ndarray)
    return isinstance(examples, list | tuple) and any(
        isinstance(each, columns) or hasattr(each, "iloc") for each in examples
    )


def _pair(examples: Any, name: str) -> Split:
    if len(examples) != 2:
        raise EnfoldError(
            f"{name} must be a pair (inputs, labels), got {len(examples)} elements: pass (inputs, labels)"
        )
    inputs, labels = examples
    if isinstance(inputs, np.ndarray):
        inputs = as_inputs(inputs, f"the inputs of {name}")
    if isinstance(labels, np.ndarray):
        labels = as_labels(labels, f"the labels of {name}")
    for what, value in (("inputs", inputs), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise EnfoldError(
                f"the {what} of {name} must be a tensor or a numpy array, got a {type(value).__name__}: "
                f"{_as_array(value)}"
            )
    if labels.ndim != 1 or len(labels) != len(inputs):
        remedy = "pass labels.argmax(1)" if labels.ndim == 2 else "pass class indices of shape (N,)"
        raise EnfoldError(
            f"the labels of {name} must be one class index per input, got shape {tuple(labels.shape)} for "
            f"{len(inputs)} inputs: {remedy}"
        )
    split = Split(inputs, labels)
    if len(split) and int(split.labels.min()) < 0:
        raise EnfoldError(
            f"the labels of {name} must be class indices from 0, got {int(split.labels.min())}: number the classes "
            "from 0 and leave out examples without a class"
        )
    return split


def _as_array(value: object) -> str:
    return "pass value.to_numpy()" if hasattr(value, "iloc") else "pass torch.tensor(values)"


def _refusal(examples: object, name: str) -> str:
    kind = type(examples).__name__
    remedy = f"pass {ACCEPTED}"
    if hasattr(examples, "iloc"):
        remedy = "pass (frame[columns].to_numpy(dtype='float32'), frame[label].to_numpy())"
    elif isinstance(examples, str):
        remedy = f"load it first with enfold.data.load({examples!r})"
    return f"{name} must be {ACCEPTED}, got {'None' if examples is None else f'a {kind}'}: {remedy}"


def _first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch without advancing torch's random state; None if there is none."""
    with torch.random.fork_rng(devices=[]):
        return next(iter(loader), None)


def _check_batch(batch: Any, name: str) -> None:
    if batch is None:
        return
    remedy = "yield pairs of tensors from the loader"
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f"{len(batch)} elements" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        raise EnfoldError(f"a batch of {name} must be a pair (inputs, labels), got {size}: {remedy}")
    for what, value in zip(("inputs", "labels"), batch, strict=True):
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise EnfoldError(f"the {what} of a batch of {name} must be a tensor, got a {kind}: {remedy}")
    if len(batch[0]) != len(batch[1]):
        sizes = f"{len(batch[0])} inputs and {len(batch[1])} labels"
        raise EnfoldError(f"a batch of {name} must have one label per input, got {sizes}: {remedy}")


def _shape(part: Part) -> tuple[int, ...]:
    if isinstance(part, Split):
        return tuple(part.inputs.shape[1:])
    batch = None if isinstance(part, Iterator) else _first_batch(part)
    return () if batch is None else tuple(batch[0].shape[1:])
