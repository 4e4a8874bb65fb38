"""Convert what users have (loaders, data sets, tensors, arrays) to the `Data` that the library works with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from enfold.data.arrays import as_inputs, as_labels
from enfold.data.dataset import Data, Part, Split, whole_numbers
from enfold.errors import EnfoldError

Examples = Data | Part | Dataset[Any] | tuple[Any, Any]
"""What `fit`, `distill`, `merge` and `evaluate` accept: a DataLoader or another iterable of (inputs, labels) batches, a
Dataset, a pair (inputs, labels) of tensors or numpy arrays, a `Split`, or a built-in data set."""

EMPTY: list[Any] = []
ACCEPTED = "a DataLoader, a Dataset, a pair (inputs, labels) of tensors or arrays, or a data set of enfold.data.load"


def as_data(
    train: Examples | None = None, val: Examples | None = None, test: Examples | None = None, *, batch_size: int = 128
) -> Data:
    """Convert training, validation and test examples to one `Data`.

    Args:
        train: Training examples, or a built-in data set, of which the missing splits are taken.
        val: Validation examples; none if left out.
        test: Test examples; none if left out.
        batch_size: Batch size for a Dataset, which is wrapped in a DataLoader.

    Raises:
        EnfoldError: If an argument is of another kind, or its batches are no pairs of tensors.
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
    """Raise an error that names the argument if examples are needed and none were given."""
    if examples is None:
        raise EnfoldError(f"{needed_by} needs {name} examples, got {name}=None: pass {ACCEPTED}")


def as_split(examples: Any, name: str, batch_size: int = 128) -> Part:
    """Convert one argument to tensors in memory or to an iterable of batches.

    Args:
        examples: What the user passed.
        name: Its name in error messages: "train", "val" or "test".
        batch_size: Batch size for a Dataset.
    """
    if isinstance(examples, Data):
        chosen: Part = getattr(examples, name)
        return chosen
    if isinstance(examples, Split):
        return examples
    if isinstance(examples, TensorDataset):
        examples = examples.tensors
    if isinstance(examples, list | tuple) and examples and isinstance(examples[0], Tensor | np.ndarray):
        return _pair(examples, name)
    if isinstance(examples, Dataset):
        shuffle = name == "train" and not isinstance(examples, IterableDataset)
        examples = DataLoader(examples, batch_size=batch_size, shuffle=shuffle)
    if hasattr(examples, "iloc") or isinstance(examples, str | bytes | dict | Tensor | np.ndarray):
        raise EnfoldError(_refusal(examples, name))
    if not isinstance(examples, Iterable):
        raise EnfoldError(_refusal(examples, name))
    if not isinstance(examples, Iterator):  # a generator would lose the batch that is looked at
        _check_batch(_first_batch(examples), name)
    return examples


def _pair(examples: Any, name: str) -> Split:
    if len(examples) != 2:
        raise EnfoldError(
            f"{name} must be a pair (inputs, labels), got {len(examples)} tensors or arrays: pass (inputs, labels)"
        )
    inputs, labels = examples
    if isinstance(inputs, np.ndarray):
        inputs = as_inputs(inputs, f"the inputs of {name}")
    if isinstance(labels, np.ndarray):
        labels = as_labels(labels, f"the labels of {name}")
    if not (isinstance(inputs, Tensor) and isinstance(labels, Tensor)):
        raise EnfoldError(_refusal(examples, name))
    return Split(inputs, labels)


def _refusal(examples: object, name: str) -> str:
    kind = type(examples).__name__
    remedy = f"pass {ACCEPTED}"
    if hasattr(examples, "iloc"):
        remedy = "pass (frame[columns].to_numpy(dtype='float32'), frame[label].to_numpy())"
    elif isinstance(examples, str):
        remedy = f"load it first with enfold.data.load({examples!r})"
    return f"{name} must be {ACCEPTED}, got {'None' if examples is None else f'a {kind}'}: {remedy}"


def _first_batch(loader: Iterable[Any]) -> Any:
    """The first batch, without a trace in torch's random state; None if there is none."""
    with torch.random.fork_rng(devices=[]):
        return next(iter(loader), None)


def _check_batch(batch: Any, name: str) -> None:
    if batch is None:
        return
    remedy = "yield pairs of tensors from the loader"
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f"{len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        raise EnfoldError(f"a batch of {name} must be a pair (inputs, labels), got {size}: {remedy}")
    for what, part in zip(("inputs", "labels"), batch, strict=True):
        if not isinstance(part, Tensor):
            raise EnfoldError(f"the {what} of a batch of {name} must be a tensor, got {type(part).__name__}: {remedy}")
    if not batch[1].is_floating_point():
        whole_numbers(batch[1])


def _shape(part: Part) -> tuple[int, ...]:
    if isinstance(part, Split):
        return tuple(part.inputs.shape[1:])
    batch = None if isinstance(part, Iterator) else _first_batch(part)
    return () if batch is None else tuple(batch[0].shape[1:])
