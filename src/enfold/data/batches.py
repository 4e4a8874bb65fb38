"""Batches for training: in a separate order for each member or in one order for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from enfold.data.augment import Augmentation, augmentation
from enfold.data.dataset import Data, Part, Split, length, pixels
from enfold.data.splits import fold_numbers
from enfold.data.tree import clone, count_examples, describe, select_examples, to_device
from enfold.data.unpack import Batches
from enfold.errors import EnfoldError
from enfold.seeds import generator


@dataclass(frozen=True)
class Batch:
    """The examples of one step: the same for all members, or with a leading member axis.

    Args:
        inputs: Inputs (B, ...) or (M, B, ...); from a loader, of any structure.
        targets: Targets (B, ...) or (M, B, ...); from a loader, as it yields them.
        own: Whether there is a member axis.
        indices: Indices of the examples in the training split, (B,) or (M, B); None for a loader.
        augmented: Whether the inputs may be augmented.
        weights: Weights of the examples in the loss, (B,) or (M, B); None for equal weights.
    """

    inputs: Any
    targets: Any
    own: bool = False
    indices: Tensor | None = None
    augmented: bool = False
    weights: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of examples of each member."""
        return count_targets(self.targets[0] if self.own else self.targets)

    def member(self, index: int) -> Batch:
        """Return the batch of one member: M = 1 with a member axis, else the same batch."""
        if not self.own:
            return self
        own = slice(index, index + 1)
        indices, weights = (None if each is None else each[own] for each in (self.indices, self.weights))
        return replace(self, inputs=self.inputs[own], targets=self.targets[own], indices=indices, weights=weights)

    def divide(self, rows: Tensor) -> Batch:
        """Return the batch with examples of each member's own, from indices (M, B') of the examples of this batch."""
        indices = None if self.indices is None else self.indices[rows.to(self.indices.device)]
        weights = None if self.weights is None else self.weights[rows.to(self.weights.device)]
        inputs, targets = (select_examples(each, rows) for each in (self.inputs, self.targets))
        return Batch(inputs, targets, True, indices, self.augmented, weights)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        inputs, targets, weights = (to_device(each, device) for each in (self.inputs, self.targets, self.weights))
        return replace(self, inputs=inputs, targets=targets, weights=weights)


def count_targets(targets: Any) -> int:
    """Return the number of examples of a batch from its targets."""
    size = count_examples(targets)
    return 1 if size is None else size


@dataclass(frozen=True)
class Order:
    """The order of the training examples. All random draws depend on seed, member and epoch only.

    Args:
        batch_size: Examples per batch and member.
        members: Indices of members with a separate order each; None for one order for all.
        bootstrap: Train each member on a bootstrap sample of the examples.
        augment: Names of augmentations.
        seed: Seed of all draws.
        split: Use one order and divide each batch among the members.
        folds: Leave out fold k of the examples for member k (`fold_numbers`); 0 for none.
    """

    batch_size: int = 128
    members: Sequence[int] | None = None
    bootstrap: bool = False
    augment: Sequence[str] = ()
    seed: int = 0
    split: bool = False
    folds: int = 0

    def steps(self, part: Part) -> int | None:
        """Return the number of batches in an epoch; None if it is unknown."""
        if isinstance(part, Split):
            return -(-self._used_examples(len(part)) // self.batch_size)
        return length(part)

    def _used_examples(self, size: int) -> int:
        """Return the number of examples in an epoch; a last batch of one example is dropped because of batch norm."""
        size -= -(-size // self.folds) if self.folds else 0  # the same for all members: those without the largest fold
        return size - 1 if size % self.batch_size == 1 and size > self.batch_size else size

    def batches(self, data: Data, epoch: int) -> Iterator[Batch]:
        """Yield the batches of one epoch.

        Args:
            data: Data whose training split is used.
            epoch: Index of the epoch, from 0.

        Raises:
            EnfoldError: If there are no examples or an option does not fit the data.
        """
        transform = augmentation(self.augment) if self.augment else None
        if not isinstance(data.train, Split):
            yield from self._from_loader(data.train, epoch, transform)
            return
        if not len(data.train):
            raise EnfoldError("train must have at least one example, got none: pass more examples")
        if self.split and self.members is not None:
            yield from self._divide_batches(data, epoch)
            return
        streams = [None] if self.members is None else list(self.members)
        orders = torch.stack([self._permutation(len(data.train), stream, epoch) for stream in streams])  # (M, N)
        sources = [generator(self.seed, "augment", _name(stream), epoch) for stream in streams]
        for chosen in orders[:, : self._used_examples(len(data.train))].split(self.batch_size, dim=1):
            inputs = pixels(data.train.inputs[chosen])  # (M, B, ...)
            if transform is not None:
                pairs = zip(inputs, sources, strict=True)
                inputs = torch.stack([transform(images, source) for images, source in pairs])
            inputs, targets = data.normalise(inputs), data.train.targets[chosen]
            if self.members is None:
                inputs, targets, chosen = inputs[0], targets[0], chosen[0]
            yield Batch(inputs, targets, self.members is not None, chosen, transform is not None)

    def _divide_batches(self, data: Data, epoch: int) -> Iterator[Batch]:
        """Yield batches in one order, divided among the members: (M, B / M); the remainder is dropped."""
        parts = len(self.members or ())
        if self.batch_size < 2 * parts:
            raise EnfoldError(
                f"batch_size must be at least {2 * parts} to be split among {parts} members, got {self.batch_size}: "
                "raise batch_size"
            )
        undivided = replace(self, members=None, split=False)
        for batch in undivided.batches(data, epoch):
            used = len(batch.targets) - len(batch.targets) % parts
            if used < 2 * parts:
                continue  # batch norm needs more than one example

            def divide(tensor: Tensor, used: int = used) -> Tensor:
                return tensor[:used].view(parts, used // parts, *tensor.shape[1:])

            indices = None if batch.indices is None else divide(batch.indices)
            yield Batch(divide(batch.inputs), divide(batch.targets), True, indices, batch.augmented)

    def _permutation(self, size: int, stream: int | None, epoch: int) -> Tensor:
        order = torch.randperm(size, generator=generator(self.seed, "order", _name(stream), epoch))
        if self.bootstrap:
            drawn = torch.randint(size, (size,), generator=generator(self.seed, "bootstrap", _name(stream)))
            return drawn[order]
        if self.folds and stream is not None:
            order = order[fold_numbers(size, self.folds, self.seed)[order] != stream % self.folds]
            return order[: size - -(-size // self.folds)]
        return order

    def _from_loader(self, loader: Iterable[Any], epoch: int, transform: Augmentation | None) -> Iterator[Batch]:
        if self.bootstrap or self.folds:
            name = "bootstrap" if self.bootstrap else "folds"
            raise EnfoldError(
                f"{name} needs the training split in memory, got a loader: pass tensors, or resample in the loader"
            )
        source = generator(self.seed, "augment", "shared", epoch)
        largest = 0
        for inputs, targets, weights in loader if isinstance(loader, Batches) else Batches(loader):
            size = count_targets(targets)
            if size == 1 < largest:
                continue  # a last batch of one example, as for a Split
            largest = max(largest, size)
            # A copy, as networks that modify their inputs in place would change the batches of a list.
            inputs = clone(inputs) if transform is None else _augment(inputs, transform, source)
            indices = getattr(getattr(loader, "loader", loader), "indices", None)  # of an IndexedLoader
            # A loader may augment, so that nothing is cached.
            yield Batch(inputs, targets, indices=indices, augmented=True, weights=weights)
        if not largest:
            raise EnfoldError(
                f"train must yield batches in every epoch, got none in epoch {epoch + 1}: "
                "pass a DataLoader or a list, not an exhausted generator"
            )


def _augment(inputs: Any, transform: Augmentation, source: torch.Generator) -> Tensor:
    if not isinstance(inputs, Tensor):
        raise EnfoldError(
            f"augment needs batches of images (B, C, H, W), got {describe(inputs)}: augment in the loader, and leave "
            "augment out"
        )
    return transform(inputs, source)


def _name(stream: int | None) -> int | str:
    return "shared" if stream is None else stream
