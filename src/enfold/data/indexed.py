"""Batches of a Dataset together with the indices of their examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class RecordedBatches(BatchSampler):
    """Batches of indices in random order, which can be read again beside the batches of a DataLoader."""

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        super().__init__(RandomSampler(dataset), batch_size, drop_last=False)  # type: ignore[arg-type]
        self.drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn = deque()
        for batch in super().__iter__():
            self.drawn.append(batch)
            yield batch


class IndexedLoader:
    """The batches of a Dataset in random order; `indices` are the examples of the batch that was yielded last."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, collate: Callable[[Any], Any] | None = None) -> None:
        self.sampler = RecordedBatches(dataset, batch_size)
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, collate_fn=collate)
        self.num_examples = len(dataset)  # type: ignore[arg-type]
        self.indices: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.indices = torch.tensor(self.sampler.drawn.popleft())
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


def loader_indices(loader: Any) -> int | None:
    """Return the number of examples of a loader whose batches have indices; None for others."""
    inner = getattr(loader, "loader", loader)
    return inner.num_examples if isinstance(inner, IndexedLoader) else None
