"""Batches for training: every member in its own order, or all in one, by index from tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enfold.data.augment import Augmentation, augmentation
from enfold.data.dataset import Data, Part, Split, length, pixels
from enfold.errors import EnfoldError
from enfold.seeds import generator


@dataclass(frozen=True)
class Batch:
    """One step's examples: the same for all members, or with a leading member axis if each has its own."""

    inputs: Tensor  # (B, ...) or (M, B, ...)
    labels: Tensor  # (B,) or (M, B) int64; a loader's are as they came
    own: bool = False  # whether the member axis is there
    indices: Tensor | None = None  # of the examples in the training part, shaped as labels; None for a loader
    augmented: bool = False

    def member(self, index: int) -> Batch:
        """What one member sees: M = 1 if each has its own, else the same batch."""
        if not self.own:
            return self
        indices = None if self.indices is None else self.indices[index : index + 1]
        own = slice(index, index + 1)
        return replace(self, inputs=self.inputs[own], labels=self.labels[own], indices=indices)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        inputs, labels = self.inputs.to(device, non_blocking=True), self.labels.to(device, non_blocking=True)
        return replace(self, inputs=inputs, labels=labels)


@dataclass(frozen=True)
class Order:
    """Which examples come when. Everything drawn depends on the seed, the member and the epoch alone."""

    batch_size: int = 128
    members: Sequence[int] | None = None  # whose own order; None: one order for all
    bootstrap: bool = False  # bagging: each member trains on N draws with replacement
    augment: Sequence[str] = ()
    seed: int = 0
    split: bool = False  # one order, each batch divided among the members

    def steps(self, part: Part) -> int | None:
        """Batches in an epoch, where that can be known."""
        if isinstance(part, Split):
            return -(-self._used(len(part)) // self.batch_size)
        return length(part)

    def _used(self, size: int) -> int:
        """Examples in an epoch: a last batch of one is left out, because batch norm has no variance of one example."""
        return size - 1 if size % self.batch_size == 1 and size > self.batch_size else size

    def batches(self, data: Data, epoch: int) -> Iterator[Batch]:
        """One epoch of the training part."""
        transform = augmentation(self.augment) if self.augment else None
        if not isinstance(data.train, Split):
            yield from self._from_loader(data.train, epoch, transform)
            return
        if not len(data.train):
            raise EnfoldError("the training part must hold examples, got none: pass at least one")
        if self.split and self.members is not None:
            yield from self._divided(data, epoch)
            return
        streams = [None] if self.members is None else list(self.members)
        orders = torch.stack([self._permutation(len(data.train), stream, epoch) for stream in streams])  # (M, N)
        sources = [generator(self.seed, "augment", _name(stream), epoch) for stream in streams]
        for chosen in orders[:, : self._used(len(data.train))].split(self.batch_size, dim=1):
            inputs = pixels(data.train.inputs[chosen])  # (M, B, ...)
            if transform is not None:
                pairs = zip(inputs, sources, strict=True)
                inputs = torch.stack([transform(images, source) for images, source in pairs])
            inputs, labels = data.normalise(inputs), data.train.labels[chosen]
            if self.members is None:
                inputs, labels, chosen = inputs[0], labels[0], chosen[0]
            yield Batch(inputs, labels, self.members is not None, chosen, transform is not None)

    def _divided(self, data: Data, epoch: int) -> Iterator[Batch]:
        """One order for all, of which each member sees its part: (M, B / M); what cannot be divided is left out."""
        parts = len(self.members or ())
        if self.batch_size < 2 * parts:
            raise EnfoldError(
                f"a batch split among {parts} members must have at least {2 * parts} examples, got {self.batch_size}: "
                "raise batch_size"
            )
        whole = replace(self, members=None, split=False)
        for batch in whole.batches(data, epoch):
            used = len(batch.labels) - len(batch.labels) % parts
            if used < 2 * parts:
                continue  # batch norm has no variance of one example

            def divided(tensor: Tensor, used: int = used) -> Tensor:
                return tensor[:used].view(parts, used // parts, *tensor.shape[1:])

            indices = None if batch.indices is None else divided(batch.indices)
            yield Batch(divided(batch.inputs), divided(batch.labels), True, indices, batch.augmented)

    def _permutation(self, size: int, stream: int | None, epoch: int) -> Tensor:
        order = torch.randperm(size, generator=generator(self.seed, "order", _name(stream), epoch))
        if self.bootstrap:
            drawn = torch.randint(size, (size,), generator=generator(self.seed, "bootstrap", _name(stream)))
            return drawn[order]
        return order

    def _from_loader(
        self, loader: Iterable[tuple[Tensor, Tensor]], epoch: int, transform: Augmentation | None
    ) -> Iterator[Batch]:
        if self.bootstrap:
            raise EnfoldError(
                "bagging needs the training part in memory, got a loader: pass a Split, or draw inside the loader"
            )
        source = generator(self.seed, "augment", "shared", epoch)
        largest = 0
        for inputs, labels in loader:
            if len(labels) == 1 < largest:
                continue  # as the last batch of a Split
            largest = max(largest, len(labels))
            # Not the loader's own tensor: a network that works in place on it would change what a list holds.
            inputs = inputs.clone() if transform is None else transform(inputs, source)
            yield Batch(inputs, labels, augmented=True)  # a loader may augment: cache nothing
        if not largest:
            raise EnfoldError(
                f"the training part must yield batches in every epoch, got none in epoch {epoch + 1}: "
                "pass a DataLoader or a list, not a generator that is used up"
            )


def _name(stream: int | None) -> int | str:
    return "shared" if stream is None else stream
