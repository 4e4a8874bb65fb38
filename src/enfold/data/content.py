"""The content of data as digests: the same data are recognised whatever they are called and wherever they lie.

A `Split` is covered completely, and so are lists of batches and a `DataLoader` of a `TensorDataset`. Of any other
`DataLoader` without worker processes the first examples are covered, if they are the same when they are read again; of
everything else, only its length and its source.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from enfold.data.dataset import Data, Part, Split, length
from enfold.io.files import digest

NAMES = {"train": "training", "val": "validation", "test": "test"}
FIRST = 16  # examples of a loader's data set that are read


def content(data: Data, parts: Sequence[str] = tuple(NAMES)) -> dict[str, Any]:
    """What tells these parts of the data from others, by the words for it."""
    found: dict[str, Any] = {}
    for name in parts:
        own = _of_part(getattr(data, name), data.source)
        found |= {f"{NAMES[name]} {key}": value for key, value in own.items()}
    normalisation = digest([], f"{data.mean} {data.std}")
    return {**found, "normalisation": normalisation, "classes": data.num_classes, "shape": list(data.shape)}


def _of_part(part: Part, source: str) -> dict[str, Any]:
    if isinstance(part, Split):
        return {"inputs": part.digests[0], "labels": part.digests[1]}
    examples = _digest(part)
    known = {"batches": length(part), "batch size": getattr(part, "batch_size", None), "examples": examples}
    return known if examples is not None else {**known, "source": source}


def _digest(part: Part) -> str | None:
    """Of the examples that can be read without changing what is read next."""
    if isinstance(part, list | tuple):
        return _digest_tree(part)
    dataset = part.dataset if isinstance(part, DataLoader) else None
    if isinstance(dataset, TensorDataset):
        return digest(dataset.tensors)
    if dataset is None or isinstance(dataset, IterableDataset) or part.num_workers:  # type: ignore[union-attr]
        return None
    try:
        once, again = (_first(dataset) for _ in range(2))
    except Exception:  # the user's own code, which is asked for something that it need not have
        return None
    return once if once == again else None


def _first(dataset: Any) -> str | None:
    """Of the first examples, with the same random draws at each call."""
    with _own_randomness():
        return _digest_tree([dataset[index] for index in range(min(FIRST, len(dataset)))])


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Inside the block the generators of torch, numpy and Python begin alike; after it they are as they were."""
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
    """Of a nested collection of tensors, arrays, numbers and texts; None if it holds anything else."""
    tensors: list[Tensor] = []
    words = _words(tree, tensors)
    return None if words is None else digest(tensors, words)


def _words(tree: Any, tensors: list[Tensor]) -> str | None:
    """The structure as a text, and its tensors, which are collected."""
    if isinstance(tree, Tensor | np.ndarray):
        tensors.append(torch.as_tensor(tree))
        return "tensor"
    if isinstance(tree, int | float | str | bytes | None):
        return repr(tree)
    if isinstance(tree, Mapping):
        tree = list(tree.items())
    if not isinstance(tree, list | tuple):
        return None
    inner = [_words(each, tensors) for each in tree]
    return None if None in inner else f"[{', '.join(map(str, inner))}]"
