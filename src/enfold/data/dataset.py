"""Data: three splits, the number of classes, the shape of one input, and the normalization of raw inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from enfold.data.unpack import Batches, Unpacked
from enfold.display import html_table
from enfold.errors import EnfoldError
from enfold.io.files import digest


@dataclass(frozen=True)
class Split:
    """Examples in memory.

    Args:
        inputs: (N, ...). Pixels stay uint8 (N, C, H, W) until they are batched; anything else is used unchanged.
        targets: (N, ...). Class indices, or the targets of another task; integers are stored as int64.
        mean: Mean of each channel of pixels in [0, 1], subtracted when a batch is prepared.
        std: Standard deviation of each channel, divided by when a batch is prepared.

    Raises:
        EnfoldError: If there is not one target per input.
    """

    inputs: Tensor
    targets: Tensor
    mean: tuple[float, ...] | None = field(default=None, kw_only=True)
    std: tuple[float, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.targets.ndim or len(self.inputs) != len(self.targets):
            raise EnfoldError(
                f"a split must have one target per input, got {len(self.inputs)} inputs and targets of shape "
                f"{tuple(self.targets.shape)}: pass targets of shape (N, ...)"
            )
        if not (self.targets.is_floating_point() or self.targets.is_complex()):
            object.__setattr__(self, "targets", self.targets.long())

    @property
    def labels(self) -> Tensor:
        """The targets as class indices, (N,).

        Raises:
            EnfoldError: If they are not one integer per example.
        """
        if self.targets.ndim != 1:
            raise EnfoldError(
                f"labels must be one class index per example, got targets of shape {tuple(self.targets.shape)}: pass "
                "targets of shape (N,)"
            )
        return whole_numbers(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        return f"Split({len(self)} inputs of shape {tuple(self.inputs.shape[1:])}, {self.inputs.dtype})"

    def __getitem__(self, index: Tensor | slice) -> Split:
        return replace(self, inputs=self.inputs[index], targets=self.targets[index])

    def prepare(self, inputs: Tensor) -> Tensor:
        """Convert raw inputs to what a network expects: scale bytes to [0, 1] and normalize each channel."""
        return _normalise(pixels(inputs), self.mean, self.std, self.inputs.ndim - 1)

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of the inputs and of the targets; recomputed only if torch has changed a tensor."""
        tensors = self.inputs, self.targets
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        known: tuple[Any, tuple[str, str]] | None = vars(self).get("_digests")
        if known is None or known[0] != versions:
            known = vars(self)["_digests"] = versions, (digest([self.inputs]), digest([self.targets]))
        return known[1]


Loader = Iterable[Any]
"""A DataLoader, or another iterable of batches, each with inputs and a target."""

Part = Split | Loader
PartName = Literal["train", "val", "test"]


@dataclass(frozen=True, repr=False)
class Data:
    """Training, validation and test examples of one problem.

    Args:
        train: Training examples: a `Split`, or a DataLoader or another iterable of batches.
        val: Validation examples, which select epochs and fit temperatures.
        test: Test examples.
        num_classes: Number of classes; None if unknown, labels are then compared with the network's outputs.
        shape: Shape of one input, without the batch axis.
        names: Names of the classes.
        mean: Mean of each channel of pixels in [0, 1].
        std: Standard deviation of each channel.
        source: Where the data comes from, for reports.

    Raises:
        EnfoldError: If labels are not class indices, or inputs are not finite.
    """

    train: Part
    val: Part
    test: Part
    num_classes: int | None
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    source: str = "in memory"

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
        """Return a split that is normalized with the mean and standard deviation of this data."""
        if (part.mean, part.std) == (self.mean, self.std):
            return part
        return replace(part, mean=self.mean, std=self.std)

    def _check(self, name: str, part: Split) -> None:
        if self.num_classes is not None:
            class_labels(part.labels, self.num_classes, f"the {name} split")
        if part.inputs.is_floating_point() and not bool(torch.isfinite(part.inputs).all()):
            raise EnfoldError(
                f"inputs must be finite, got NaN or infinity in the {name} split: remove or replace these values"
            )

    def rows(self) -> list[list[str]]:
        """Return the name, the number of examples, and type and shape of inputs and targets of each split."""
        return [[name, *_describe(getattr(self, name))] for name in ("train", "val", "test")]

    def __repr__(self) -> str:
        classes = "" if self.num_classes is None else f", {self.num_classes} classes"
        parts = ", ".join(f"{name} {_describe(getattr(self, name))[0]}" for name in ("train", "val", "test"))
        return f"Data({self.source}: {parts}, inputs {_shape(self.shape)}{classes})"

    def _repr_html_(self) -> str:
        classes = "" if self.num_classes is None else f", {self.num_classes} classes"
        listed = f": {', '.join(self.names)}" if 0 < len(self.names) <= 20 else ""
        return html_table(["", "examples", "inputs", "targets"], self.rows(), f"{self.source}{classes}{listed}")

    def prepare(self, inputs: Tensor) -> Tensor:
        """Convert raw inputs to what a network expects: scale bytes to [0, 1] and normalize each channel."""
        return self.normalise(pixels(inputs))

    def normalise(self, inputs: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation of each channel: (..., C, H, W)."""
        return _normalise(inputs, self.mean, self.std, len(self.shape))

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Invert `normalise`: convert network inputs to pixels in [0, 1]; inputs without statistics are unchanged."""
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
        """Return whether inputs are known to be in [0, 1] before normalization: bytes, or pixels with a mean."""
        bytes_held = isinstance(self.train, Split) and self.train.inputs.dtype == torch.uint8
        return bytes_held or (self.mean is not None and self.std is not None)

    def replace(self, **changes: object) -> Data:
        """Return a copy with other fields, for example ``data.replace(train=loader)``."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _describe(part: Part) -> list[str]:
    """Return the number of examples of a part, and type and shape of inputs and targets; dashes if unknown."""
    if isinstance(part, Split):
        shapes = [
            f"{str(each.dtype).removeprefix('torch.')} {_shape(each.shape[1:])}" for each in (part.inputs, part.targets)
        ]
        return [str(len(part)), *shapes]
    size = length(part)
    return ["-" if size is None else f"{size} batches", type(part).__name__, "-"]


def _shape(sizes: Iterable[int]) -> str:
    return "×".join(map(str, sizes)) or "number"


def _normalise(inputs: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None, axes: int) -> Tensor:
    if mean is None or std is None:
        return inputs
    return (inputs - _by_channel(mean, inputs, axes)) / _by_channel(std, inputs, axes)


def _by_channel(values: tuple[float, ...], like: Tensor, axes: int) -> Tensor:
    """Return values per channel in the shape of one example with this many axes, the channel first."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *(1,) * (axes - 1))


def pixels(inputs: Tensor) -> Tensor:
    """Convert uint8 pixels to floats in [0, 1]; return anything else unchanged."""
    return inputs.float().div_(255) if inputs.dtype == torch.uint8 else inputs


def whole_numbers(labels: Tensor) -> Tensor:
    """Convert integer labels of any type to int64.

    Raises:
        EnfoldError: If they are not integers, which a cast would truncate.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise EnfoldError(
            f"labels must be integer class indices, got {labels.dtype}: pass labels.long() if they are class indices, "
            "or a DataLoader and your own objective for other targets"
        )
    return labels.long()


def class_labels(labels: Tensor, num_classes: int, where: str) -> Tensor:
    """Convert labels to int64 after checking that each is a class index; -100 is refused as well.

    Args:
        labels: Labels of any integer type.
        num_classes: Number of classes.
        where: Their name in error messages.

    Raises:
        EnfoldError: If a label is not a class index.
    """
    labels = whole_numbers(labels)
    low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise EnfoldError(
            f"labels must be between 0 and num_classes - 1 = {num_classes - 1}, got {wrong} in {where}: number the "
            "classes from 0, raise num_classes, or leave out what has no class: examples, or pixels and tokens by "
            f"task=Classification(ignore_index={wrong})"
        )
    return labels


def length(part: Part) -> int | None:
    """Return the number of examples of a split or of batches of a loader; None if it is unknown."""
    try:
        return len(part)  # type: ignore[arg-type]
    except TypeError:  # no length, or a DataLoader of a dataset without one
        return None


def some(labels: Tensor, examples: int | None) -> Tensor | slice:
    """Return the index of a representative subset: the first examples, or evenly spaced ones.

    Images from a folder are ordered by class, so that the first examples may lack classes.

    Args:
        labels: Labels of all examples.
        examples: Size of the subset; None for all.
    """
    if examples is None or examples >= len(labels):
        return slice(None)
    classes = len(labels.unique())
    if len(labels[:examples].unique()) < classes <= examples:
        return torch.arange(examples, device=labels.device) * len(labels) // examples
    return slice(examples)


def has_examples(part: Part | None) -> bool:
    """Return whether there are examples; an iterable of unknown length is assumed to have some."""
    return part is not None and length(part) != 0


def evaluation_batches(part: Part, batch_size: int) -> Iterator[Unpacked]:
    """Yield the examples of a split in order, prepared; the batches of a loader are split into inputs and target."""
    if not isinstance(part, Split):
        yield from part if isinstance(part, Batches) else Batches(part)
        return
    for start in range(0, len(part), batch_size):
        chunk = part[start : start + batch_size]
        yield Unpacked(part.prepare(chunk.inputs), chunk.targets)
