"""Convert what users have (loaders, datasets, tensors, arrays) to `Data`, and refuse everything else at the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from enfold.data.arrays import as_inputs
from enfold.data.data_module import is_data_module, read_loader, require_loader
from enfold.data.dataset import Data, Part, Split
from enfold.data.indexed import IndexedLoader
from enfold.data.tree import count_examples, describe, first_examples, map_tensors, tensors
from enfold.data.unpack import TARGETS, Batches, Unpack, Unpacked, are_targets, count_inputs, no_targets
from enfold.errors import EnfoldError

Examples = Data | Part | Dataset[Any] | tuple[Any, ...]
"""Accepted by `fit`, `distill`, `merge` and `evaluate`: a DataLoader or another iterable of batches, a Dataset, a pair
(inputs, targets) of tensors or numpy arrays, a dictionary of them with `labels`, a `Split`, a data module of Lightning,
or a built-in data set."""

EMPTY: list[Any] = []
ACCEPTED = "a DataLoader, a Dataset, a pair (inputs, targets) of tensors or arrays, or a data set of enfold.data.load"


def as_data(
    train: Examples | None = None,
    val: Examples | None = None,
    test: Examples | None = None,
    *,
    batch_size: int = 128,
    unpack: Unpack | None = None,
    network: nn.Module | None = None,
    indexed: bool = False,
    needs_targets: bool = True,
) -> Data:
    """Convert training, validation and test examples to one `Data`.

    Args:
        train: Training examples, or a built-in data set, whose other splits are used where `val` or `test` is None.
        val: Validation examples; None for none.
        test: Test examples; None for none.
        batch_size: Batch size for a Dataset, which is wrapped in a DataLoader.
        unpack: Function that splits a batch into (inputs, target) or (inputs, target, weights); None for the usual
            structures of batches.
        network: The network that gets the inputs, by which batches of three elements are understood.
        indexed: Whether batches of a Dataset of training examples come with the indices of these examples.
        needs_targets: Whether examples without targets are refused; otherwise their targets are tensors (B, 0).

    Returns:
        The splits, with the shape of the inputs inferred from one batch.

    Raises:
        EnfoldError: If an argument is of another kind, or its batches have no inputs and target.
    """
    num_inputs = None if network is None else count_inputs(network)
    read = Reader(batch_size, unpack, num_inputs, indexed, needs_targets=needs_targets)
    if is_data_module(train) and val is None:
        val = read_loader(train, "val")
    given: dict[str, Any] = {"val": val, "test": test}
    if isinstance(train, Data):
        changes = {name: read.split(each, name) for name, each in given.items() if each is not None}
        changes |= {} if unpack is None else {"train": read.split(train, "train")}
        return train.replace(**changes) if changes else train
    splits: dict[str, Any] = {name: EMPTY if each is None else read.split(each, name) for name, each in given.items()}
    splits["train"] = EMPTY if train is None else read.split(train, "train")
    shape = next((_shape(splits[name]) for name in ("train", "val", "test") if splits[name] is not EMPTY), ())
    return Data(**splits, num_classes=None, shape=shape)


def require(examples: object, name: str, needed_by: str) -> None:
    """Raise an error that names the argument if required examples are None."""
    if examples is None:
        raise EnfoldError(f"{needed_by} needs {name} examples, got {name}=None: pass {ACCEPTED}")


def as_split(
    examples: Any,
    name: str,
    batch_size: int = 128,
    *,
    unpack: Unpack | None = None,
    network: nn.Module | None = None,
) -> Part:
    """Convert one argument to tensors in memory or to an iterable of batches.

    Args:
        examples: What the user passed.
        name: Its name in error messages: "train", "val" or "test".
        batch_size: Batch size for a Dataset.
        unpack: Function that splits a batch; None for the usual structures.
        network: The network that gets the inputs.

    Returns:
        A `Split` for tensors and arrays, otherwise a loader.

    Raises:
        EnfoldError: If it is of another kind, or its first batch has no inputs and target.
    """
    return Reader(batch_size, unpack, None if network is None else count_inputs(network)).split(examples, name)


class Reader:
    """Conversion of examples for one call.

    Args:
        batch_size: Batch size for a Dataset.
        unpack: Function that splits a batch; None for the usual structures.
        num_inputs: The number of inputs that the network takes; None if unknown.
        indexed: Whether batches of a Dataset of training examples have indices.
        needs_targets: Whether examples without targets are refused.
    """

    def __init__(
        self,
        batch_size: int,
        unpack: Unpack | None,
        num_inputs: int | None,
        indexed: bool = False,
        *,
        needs_targets: bool = True,
    ) -> None:
        self.batch_size, self.unpack, self.num_inputs, self.indexed = batch_size, unpack, num_inputs, indexed
        self.needs_targets = needs_targets

    def split(self, examples: Any, name: str) -> Part:
        """Return a `Split`, or the batches of a loader."""
        if isinstance(examples, Data):
            examples = getattr(examples, name)
        if is_data_module(examples):
            examples = require_loader(examples, name)
        if isinstance(examples, TensorDataset) and len(examples.tensors) == 2:
            examples = examples.tensors
        if not self.needs_targets:
            examples = _columns_without_targets(examples, name, self.num_inputs, is_unpacked=self.unpack is not None)
        if _is_named_columns(examples):
            examples = _from_named_columns(examples, name)
        elif _is_columns(examples):
            examples = _from_columns(examples, name, is_unpacked=self.unpack is not None)
        return examples if isinstance(examples, Split) else self.batches(examples, name)

    def batches(self, examples: Any, name: str) -> Part:
        """Return the batches of a loader or of a Dataset."""
        if isinstance(examples, Dataset):
            shuffle = name == "train" and not isinstance(examples, IterableDataset)
            collate = _identity if isinstance(examples, Columns) else None
            if self.indexed and shuffle:
                examples = IndexedLoader(examples, self.batch_size, collate)
            else:
                examples = DataLoader(examples, batch_size=self.batch_size, shuffle=shuffle, collate_fn=collate)
        is_text = isinstance(examples, str | bytes | dict | Tensor | np.ndarray)
        if hasattr(examples, "iloc") or is_text or not isinstance(examples, Iterable):
            raise EnfoldError(_refusal(examples, name))
        if not self.is_needed(examples):
            return examples
        loader = examples.loader if isinstance(examples, Batches) else examples
        unpack = self.unpack or getattr(examples, "unpack", None)
        batches = Batches(loader, unpack, self.num_inputs, needs_targets=self.needs_targets)
        if not isinstance(loader, Iterator):  # reading from a generator would lose the batch
            try:
                batch = first_batch(batches)
            except EnfoldError as error:
                raise EnfoldError(f"{name}: {error}") from error
            except TypeError as error:
                if not str(error).startswith("default_collate"):
                    raise
                raise EnfoldError(
                    f"the examples of {name} must be tensors, numbers, or dicts or tuples of them, got another type "
                    f"({error}): pass a loader that makes the batches, such as "
                    "torch_geometric.loader.DataLoader for graphs, or a DataLoader with collate_fn"
                ) from error
            _check_batch(batch, name)
        return batches

    def is_needed(self, examples: Any) -> bool:
        """Return whether batches are to be split by other rules than before."""
        if not isinstance(examples, Batches):
            return True
        is_optional = not self.needs_targets and examples.needs_targets
        return self.unpack is not None or is_optional or (self.num_inputs is not None and examples.num_inputs is None)


class Columns(Dataset[Any]):
    """Examples in memory whose inputs are several tensors, or split by the user's function."""

    def __init__(self, columns: tuple[Any, ...] | dict[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(tensors(self.columns)[0])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.columns)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch: a DataLoader calls it in place of stacking single examples, which costs more than the batch.

        Args:
            indices: Indices of the examples.
        """
        chosen = torch.tensor(indices)
        return map_tensors(lambda tensor: tensor[chosen], self.columns)


def _columns_without_targets(examples: Any, name: str, num_inputs: int | None, *, is_unpacked: bool) -> Any:
    """Return examples in memory that have inputs only, as a `Split` or as columns; other examples are unchanged."""
    columns = tuple(examples.tensors) if isinstance(examples, TensorDataset) else examples
    if isinstance(columns, Tensor | np.ndarray):
        columns = (columns,)
    if not isinstance(columns, list | tuple) or not columns or not _is_column_sequence(columns):
        return examples
    if len(columns) == 2 and columns[1] is None:
        columns = columns[:1]
    elif len(columns) > 1 and (len(columns) != num_inputs or any(isinstance(each, tuple | dict) for each in columns)):
        return examples
    inputs = tuple(_as_column(each, name, is_target=False) for each in columns)
    _require_equal_lengths(inputs, describe(columns), name)
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and not is_unpacked:
        return Split(inputs[0], no_targets(inputs[0]))
    return Columns(inputs)


def _is_column_sequence(columns: Any) -> bool:
    return _is_columns(columns) or (len(columns) == 2 and columns[1] is None and bool(tensors(columns[0])))


def has_targets(part: Part) -> bool:
    """Return whether examples have targets, from their first batch; a loader that cannot be read twice has them."""
    if isinstance(part, Split):
        return are_targets(part.targets)
    if not isinstance(part, Batches) or part.needs_targets or isinstance(part.loader, Iterator):
        return True
    batch = first_batch(part)
    return batch is None or are_targets(batch.target)


def _identity(batch: Any) -> Any:
    return batch


def _is_named_columns(examples: Any) -> bool:
    """Return whether this is a dictionary of tensors or arrays with the targets, as a tokenizer returns it."""
    return isinstance(examples, Mapping) and any(isinstance(each, Tensor | np.ndarray) for each in examples.values())


def _from_named_columns(examples: Mapping[str, Any], name: str) -> Columns:
    columns = {key: _as_column(each, name, is_target=key in TARGETS) for key, each in examples.items()}
    _require_equal_lengths(columns, describe(examples), name)
    return Columns(columns)


def _require_equal_lengths(columns: Any, given: str, name: str) -> None:
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in tensors(columns)}
    if len(lengths) != 1:
        raise EnfoldError(
            f"the inputs and targets of {name} must have one row per example, got {given}: pass the same number of rows"
        )


def _is_columns(examples: Any) -> bool:
    """Return whether this is a sequence of tensors, arrays or table columns, and not of batches."""
    columns = (Tensor, np.ndarray)
    return isinstance(examples, list | tuple) and any(
        isinstance(each, columns) or hasattr(each, "iloc") for each in examples
    )


def _from_columns(examples: Any, name: str, *, is_unpacked: bool) -> Split | Columns:
    if len(examples) < 2:
        raise EnfoldError(
            f"{name} must be a pair (inputs, targets), got {len(examples)} element: pass (inputs, targets)"
        )
    columns = tuple(_as_column(each, name, is_target=each is examples[-1]) for each in examples)
    _require_equal_lengths(columns, f"{describe(examples[0])} and {describe(examples[-1])}", name)
    if len(columns) == 2 and isinstance(columns[0], Tensor) and not is_unpacked:
        return Split(columns[0], columns[1])
    return Columns(columns)


def _as_column(values: Any, name: str, *, is_target: bool) -> Any:
    """Return inputs or targets as tensors."""
    what = f"the {'targets' if is_target else 'inputs'} of {name}"
    if isinstance(values, Tensor) or (values is None and not is_target):
        return values
    if isinstance(values, np.ndarray):
        return _as_targets(values, what) if is_target else as_inputs(values, what)
    if not is_target and isinstance(values, tuple | dict):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        found = {key: _as_column(each, name, is_target=False) for key, each in items}
        return found if isinstance(values, dict) else tuple(found.values())
    kind = type(values).__name__
    remedy = "pass value.to_numpy()" if hasattr(values, "iloc") else "pass torch.tensor(values)"
    raise EnfoldError(f"{what} must be a tensor or a numpy array, got a {kind}: {remedy}")


def _as_targets(array: np.ndarray[Any, Any], what: str) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise EnfoldError(
            f"{what} must be numbers, got an array of {array.dtype}: number the classes from 0, for example with "
            "numpy.unique(labels, return_inverse=True)"
        )
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _refusal(examples: object, name: str) -> str:
    kind = type(examples).__name__
    remedy = f"pass {ACCEPTED}"
    if hasattr(examples, "iloc"):
        remedy = "pass (frame[columns].to_numpy(dtype='float32'), frame[label].to_numpy())"
    elif isinstance(examples, str):
        remedy = f"load it first with enfold.data.load({examples!r})"
    elif hasattr(examples, "epochs"):
        return f"{name} must be examples, got a {kind}: pass it as config="
    return f"{name} must be {ACCEPTED}, got {'None' if examples is None else f'a {kind}'}: {remedy}"


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch without advancing torch's random state; None if there is none."""
    with torch.random.fork_rng(devices=[]):
        return next(iter(loader), None)


def first_inputs(part: Any, number: int = 2) -> Any:
    """Return the inputs of the first examples of a loader, or of its first batch if they cannot be told apart."""
    batch = first_batch(part if isinstance(part, Batches) else Batches(part))
    if batch is None:
        raise EnfoldError("train must yield batches, got none: pass a loader with examples")
    few = first_examples(batch.inputs, number)
    return batch.inputs if few is None else few


def _check_batch(batch: Unpacked | None, name: str) -> None:
    if batch is None:
        return
    inputs, target, _ = batch
    if isinstance(inputs, str | bytes | int | float | None):
        raise EnfoldError(
            f"the inputs of a batch of {name} must be tensors, got a {type(inputs).__name__}: yield tensors from the "
            "loader"
        )
    if isinstance(target, bool | int | float) or (isinstance(target, Tensor) and not target.ndim):
        raise EnfoldError(
            f"{name} must yield batches, got {describe(inputs)} with the single target {target}: pass "
            f"DataLoader({name}, batch_size=32) if these are single examples"
        )
    if isinstance(inputs, Tensor) and isinstance(target, Tensor) and count_examples(inputs) != count_examples(target):
        sizes = f"{describe(inputs)} and {describe(target)}"
        raise EnfoldError(f"a batch of {name} must have one target per input, got {sizes}: yield as many of both")


def _shape(part: Part) -> tuple[int, ...]:
    if isinstance(part, Split):
        return tuple(part.inputs.shape[1:])
    loader = part.loader if isinstance(part, Batches) else part
    batch = None if isinstance(loader, Iterator) else first_batch(part)
    return tuple(batch[0].shape[1:]) if batch is not None and isinstance(batch[0], Tensor) else ()
