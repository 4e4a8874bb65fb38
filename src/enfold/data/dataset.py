"""Data: three parts, the number of classes, the shape of one input and how raw inputs become a network's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.io.files import digest


@dataclass(frozen=True)
class Split:
    """Labelled examples in memory.

    Args:
        inputs: (N, ...). Pixels stay uint8 (N, C, H, W) until they are batched; anything else is used unchanged.
        labels: (N,) class indices; stored as int64.
        mean: Mean of each channel of pixels in [0, 1], subtracted when a batch is prepared.
        std: Standard deviation of each channel, divided by when a batch is prepared.
    """

    inputs: Tensor
    labels: Tensor
    mean: tuple[float, ...] | None = field(default=None, kw_only=True)
    std: tuple[float, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or self.labels.ndim != 1:
            raise EnfoldError(
                f"a split must have one label an input, got {len(self.inputs)} inputs and labels of shape "
                f"{tuple(self.labels.shape)}: pass labels of shape (N,)"
            )
        object.__setattr__(self, "labels", whole_numbers(self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self)} inputs of shape {tuple(self.inputs.shape[1:])}, {self.inputs.dtype})"

    def __getitem__(self, index: Tensor | slice) -> Split:
        return replace(self, inputs=self.inputs[index], labels=self.labels[index])

    def prepare(self, inputs: Tensor) -> Tensor:
        """Convert raw inputs to what a network expects: scale bytes to [0, 1] and normalise each channel."""
        return _normalise(pixels(inputs), self.mean, self.std, self.inputs.ndim - 1)

    @property
    def digests(self) -> tuple[str, str]:
        """What tells the inputs, and the labels, from others; computed again only where torch changed a tensor."""
        tensors = self.inputs, self.labels
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        known: tuple[Any, tuple[str, str]] | None = vars(self).get("_digests")
        if known is None or known[0] != versions:
            known = vars(self)["_digests"] = versions, (digest([self.inputs]), digest([self.labels]))
        return known[1]


Part = (
    Split | Iterable[tuple[Tensor, Tensor]]
)  # tensors in memory, or a DataLoader, or any iterable of (inputs, labels)

PartName = Literal["train", "val", "test"]


@dataclass(frozen=True)
class Data:
    """What a run learns from (train), chooses by (val) and is judged by (test)."""

    train: Part
    val: Part
    test: Part
    num_classes: int | None  # None: unknown, labels are compared with the network's outputs
    shape: tuple[int, ...]  # of one input, without the batch axis
    names: tuple[str, ...] = ()  # of the classes
    mean: tuple[float, ...] | None = None  # per channel, of pixels in [0, 1]
    std: tuple[float, ...] | None = None
    source: str = "in memory"  # where it came from, for the record

    def __post_init__(self) -> None:
        parts = [part for part in (self.train, self.val, self.test) if isinstance(part, Split)]
        measured = next((part for part in parts if part.mean is not None), None)
        if self.mean is None and measured is not None:
            object.__setattr__(self, "mean", measured.mean)
            object.__setattr__(self, "std", measured.std)
        for name in ("train", "val", "test"):
            part = getattr(self, name)
            if isinstance(part, Split):
                object.__setattr__(self, name, self.with_statistics(part))
                if len(part):
                    self._check(name, part)

    def with_statistics(self, part: Split) -> Split:
        """Return a split that is normalised with the mean and standard deviation of this data."""
        if (part.mean, part.std) == (self.mean, self.std):
            return part
        return replace(part, mean=self.mean, std=self.std)

    def _check(self, name: str, part: Split) -> None:
        if self.num_classes is not None:
            class_labels(part.labels, self.num_classes, f"the {name} part")
        if part.inputs.is_floating_point() and not bool(torch.isfinite(part.inputs).all()):
            raise EnfoldError(
                f"inputs must be finite, but the {name} part holds NaN or infinity: remove or replace these values"
            )

    def prepare(self, inputs: Tensor) -> Tensor:
        """Raw inputs as a network sees them: pixels become [0, 1] and are normalised per channel; the rest passes."""
        return self.normalise(pixels(inputs))

    def normalise(self, inputs: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation of each channel: (..., C, H, W)."""
        return _normalise(inputs, self.mean, self.std, len(self.shape))

    def denormalise(self, inputs: Tensor) -> Tensor:
        """The inverse of `normalise`: from what a network sees back to pixels in [0, 1]; the rest passes."""
        if self.mean is None or self.std is None:
            return inputs
        mean, std = (_by_channel(values, inputs, len(self.shape)) for values in (self.mean, self.std))
        return inputs * std + mean

    def known_classes(self) -> int:
        """Return the number of classes.

        Raises:
            EnfoldError: If it is unknown.
        """
        if self.num_classes is None:
            raise EnfoldError("the number of classes must be known here, got num_classes=None: pass Data(num_classes=)")
        return self.num_classes

    @property
    def has_pixels(self) -> bool:
        """Whether inputs are known to lie in [0, 1] before they are normalised: bytes, or pixels with a mean."""
        bytes_held = isinstance(self.train, Split) and self.train.inputs.dtype == torch.uint8
        return bytes_held or (self.mean is not None and self.std is not None)

    def replace(self, **changes: object) -> Data:
        """A copy with other parts, for example ``data.replace(train=loader)``."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _normalise(inputs: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None, axes: int) -> Tensor:
    if mean is None or std is None:
        return inputs
    return (inputs - _by_channel(mean, inputs, axes)) / _by_channel(std, inputs, axes)


def _by_channel(values: tuple[float, ...], like: Tensor, axes: int) -> Tensor:
    """Values of channels in the shape of one example of so many axes, of which the first is the channel."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *(1,) * (axes - 1))


def pixels(inputs: Tensor) -> Tensor:
    """uint8 pixels as floats in [0, 1]; anything else is returned as it is."""
    return inputs.float().div_(255) if inputs.dtype == torch.uint8 else inputs


def whole_numbers(labels: Tensor) -> Tensor:
    """Labels of any integer type as int64; others are refused, as a cast would cut them."""
    if labels.is_floating_point() or labels.is_complex():
        raise EnfoldError(
            f"labels of classes must be whole numbers, got the type {labels.dtype}: pass the index of each class; "
            "targets of another kind need a DataLoader and an objective of your own"
        )
    return labels.long()


def class_labels(labels: Tensor, num_classes: int, where: str) -> Tensor:
    """Labels as int64; any that is no index of a class, -100 among them, is refused."""
    labels = whole_numbers(labels)
    low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if low < 0 or high >= num_classes:
        raise EnfoldError(
            f"labels must lie between 0 and num_classes - 1 = {num_classes - 1}, but {where} has "
            f"{low if low < 0 else high}: number the classes from 0, leave out examples without a class, or raise "
            "num_classes"
        )
    return labels


def length(part: Part) -> int | None:
    """How many examples a split or batches a loader holds; None where only iterating tells."""
    try:
        return len(part)  # type: ignore[arg-type]
    except TypeError:  # no length, or a DataLoader around a dataset without one
        return None


def some(labels: Tensor, examples: int | None) -> Tensor | slice:
    """Which so many stand for all: the first, or some at even distances where these lack a class that others have.

    Images from a folder come class by class: the first thousand would be of one.
    """
    if examples is None or examples >= len(labels):
        return slice(None)
    classes = len(labels.unique())
    if len(labels[:examples].unique()) < classes <= examples:
        return torch.arange(examples, device=labels.device) * len(labels) // examples
    return slice(examples)


def has_examples(part: Part | None) -> bool:
    """Whether there is something to learn or choose by; what has no length is taken to hold examples."""
    return part is not None and length(part) != 0


def evaluation_batches(part: Part, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The examples of one part in their own order, prepared; an iterable's inputs are passed through as they are."""
    if not isinstance(part, Split):
        for inputs, labels in part:
            yield inputs, whole_numbers(labels)
        return
    for start in range(0, len(part), batch_size):
        chunk = part[start : start + batch_size]
        yield part.prepare(chunk.inputs), chunk.labels
