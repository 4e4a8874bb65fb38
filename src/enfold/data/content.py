"""Digests of data, which identify the same data independently of name and location.

A `Split`, a list of batches and a `DataLoader` of a `TensorDataset`, also in a `Subset` or a `ConcatDataset`, are
hashed completely. For other `DataLoader`s without worker processes the first examples and the indices of a `Subset` are
hashed, if reading them twice gives the same; for everything else only length and source.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from enfold.data.dataset import Data, Part, Split, length
from enfold.data.unpack import Batches
from enfold.io.files import digest

NAMES = {"train": "training", "val": "validation", "test": "test"}
FIRST = 16  # examples of a loader's dataset that are hashed


def content(data: Data, parts: Sequence[str] = tuple(NAMES)) -> dict[str, Any]:
    """Return digests and properties that identify the data, by name.

    Args:
        data: The data.
        parts: The splits to include: "train", "val", "test".
    """
    identity: dict[str, Any] = {}
    for name in parts:
        own = _split_content(getattr(data, name), data.source)
        identity |= {f"{NAMES[name]} {key}": value for key, value in own.items()}
    normalisation = digest([], f"{data.mean} {data.std}")
    return {**identity, "normalisation": normalisation, "classes": data.num_classes, "shape": list(data.shape)}


def _split_content(part: Part, source: str) -> dict[str, Any]:
    if isinstance(part, Batches):
        part = part.loader
    if isinstance(part, Split):
        return {"inputs": part.digests[0], "labels": part.digests[1]}
    examples = _digest(part)
    known = {"batches": length(part), "batch size": getattr(part, "batch_size", None), "examples": examples}
    return known if examples is not None else {**known, "source": source}


def _digest(part: Part) -> str | None:
    """Return a digest of the examples that can be read without side effects; None if there are none."""
    if isinstance(part, list | tuple):
        return _digest_tree(part)
    dataset = part.dataset if isinstance(part, DataLoader) else None
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    known = _digest_dataset(dataset)
    if known is not None or part.num_workers:  # type: ignore[union-attr]
        return known
    try:
        once, again = (_digest_first(dataset) for _ in range(2))
    except Exception:  # user code may not support indexing
        return None
    return once if once == again else None


def _digest_dataset(dataset: Any) -> str | None:
    """Return a digest of all examples of a dataset of PyTorch that has them in memory; None for any other."""
    if _reads_as(dataset, TensorDataset):
        return digest(dataset.tensors)
    if _reads_as(dataset, Subset):
        inner = _digest_dataset(dataset.dataset)
        return None if inner is None else digest([torch.as_tensor(dataset.indices)], inner)
    if _reads_as(dataset, ConcatDataset):
        parts = [_digest_dataset(each) for each in dataset.datasets]
        return None if None in parts else digest([], " ".join(map(str, parts)))
    return None


def _reads_as(dataset: Any, kind: type[Dataset[Any]]) -> bool:
    """Return whether a dataset reads its examples as this class of PyTorch does."""
    return isinstance(dataset, kind) and type(dataset).__getitem__ is kind.__getitem__


def _digest_first(dataset: Any) -> str | None:
    """Return a digest of the first examples and of the indices of a subset, with the same random draws in each call."""
    indices = [torch.as_tensor(dataset.indices)] if isinstance(dataset, Subset) else []
    with _fixed_randomness():
        first = _digest_tree([dataset[index] for index in range(min(FIRST, len(dataset)))])
    return first if first is None or not indices else digest(indices, first)


@contextmanager
def _fixed_randomness() -> Iterator[None]:
    """Seed the generators of torch, numpy and Python inside the block and restore them after it."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _digest_tree(tree: Any) -> str | None:
    """Return a digest of nested collections of tensors, arrays, numbers and texts; None for other objects."""
    tensors: list[Tensor] = []
    structure = _structure(tree, tensors)
    return None if structure is None else digest(tensors, structure)


def _structure(tree: Any, tensors: list[Tensor]) -> str | None:
    """Return the structure as text and append the tensors to the list."""
    if isinstance(tree, Tensor | np.ndarray):
        tensors.append(torch.as_tensor(tree))
        return "tensor"
    if isinstance(tree, int | float | str | bytes | None):
        return repr(tree)
    if isinstance(tree, Mapping):
        tree = list(tree.items())
    if not isinstance(tree, list | tuple):
        return None
    inner = [_structure(each, tensors) for each in tree]
    return None if None in inner else f"[{', '.join(map(str, inner))}]"
