"""Training, validation and test splits from the splits of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from enfold import seeds
from enfold.data.arrays import channel_statistics, check_split
from enfold.data.dataset import Data, Part, Split
from enfold.data.splits import resolve_size, stratified_split
from enfold.errors import EnfoldError

VALIDATION_FRACTION = 0.1
VALIDATION_LIMIT = 5_000
TEST_FRACTION = 0.2
TEST_SEED = 0  # fixed, so that no run trains on test examples of another run


@dataclass(frozen=True)
class Parts:
    """The splits of a source: a training split, and the others if the source has them."""

    train: Split
    val: Split | None
    test: Split | None
    num_classes: int | None  # None for targets that are not classes
    source: str
    names: tuple[str, ...] = ()


def assemble(
    parts: Parts,
    *,
    val_size: int | float | None = None,
    seed: int = 0,
    train_size: int | float | None = None,
    exclude_classes: Sequence[int] = (),
) -> Data:
    """Return the data of a source: check its splits, create missing ones, and compute mean and standard deviation.

    Classes are excluded after the test split is created, so that the other test examples do not depend on them.

    Args:
        parts: The splits of the source.
        val_size: Number or fraction of the validation examples; the default is the source's own split, or a tenth and
            at most 5,000.
        seed: Seed of the splits.
        train_size: Number or fraction of the training examples to use; None for all.
        exclude_classes: Indices of classes to exclude; the others are renumbered.

    Raises:
        EnfoldError: If a split or an argument is invalid.
    """
    for name in ("train", "val", "test"):
        split = getattr(parts, name)
        if split is not None:
            check_split(split, parts.num_classes, f"the {name} split of {parts.source}")
            _check_shape(split, parts.train, name, parts.source)
    train, test = parts.train, parts.test
    if test is None:
        size = resolve_size(TEST_FRACTION, len(train), "the test split")
        train, test = divide(train, size, TEST_SEED)
    own, names, num_classes = parts.val, parts.names, parts.num_classes
    if exclude_classes and num_classes is None:
        raise EnfoldError(
            f"exclude_classes must be empty for data without classes, got {list(exclude_classes)} for {parts.source}: "
            "leave it out"
        )
    if exclude_classes and num_classes is not None:
        train, test = (remove_classes(each, exclude_classes, num_classes) for each in (train, test))
        own = None if own is None else remove_classes(own, exclude_classes, num_classes)
        names, num_classes = _remaining_names(names, exclude_classes), num_classes - len(set(exclude_classes))
    train, held_out = resplit(train, own, val_size, seed, train_size)
    statistics = channel_statistics(train.inputs)
    mean, std = statistics if statistics else (None, None)
    shape = tuple(train.inputs.shape[1:])
    return Data(train, held_out, test, num_classes, shape, names, mean, std, parts.source)


def resplit(
    train: Split,
    own: Split | None,
    val_size: int | float | None,
    seed: int,
    train_size: int | float | None,
) -> tuple[Split, Split]:
    """Return a training and a validation split.

    Args:
        train: The training split.
        own: The source's own validation split, which is used unless `val_size` is given.
        val_size: Number or fraction of validation examples.
        seed: Seed of the splits.
        train_size: Number or fraction of the training examples to use; None for all.
    """
    if own is not None and val_size is None:
        held_out = own
    else:
        pool = train if own is None else _join(train, own)
        size = _validation_size(val_size, len(pool))
        train, held_out = divide(pool, size, seeds.derive(seed, "validation"))
    if train_size is not None:
        size = resolve_size(train_size, len(train), "train_size")
        if size < len(train):
            train = divide(train, size, seeds.derive(seed, "train size"))[1]
    return train, held_out


def resplit_data(data: Data, val_size: int | float | None, seed: int, train_size: int | float | None) -> Data:
    """Return data with another validation split or fewer training examples, see `resplit`.

    Args:
        data: The data.
        val_size: Size or fraction of the validation split; None for the given one.
        seed: Seed of the choice.
        train_size: Size or fraction of the training split; None for all examples.

    Raises:
        EnfoldError: If a split is not in memory.
    """
    if val_size is None and train_size is None:
        return data
    train, own = _in_memory(data.train, "train"), _in_memory(data.val, "val")
    train, held_out = resplit(train, own, val_size, seed, train_size)
    return data.replace(train=train, val=held_out)


def exclude_from_data(data: Data, classes: Sequence[int]) -> Data:
    """Return data without these classes, the others renumbered; mean and standard deviation are unchanged.

    Raises:
        EnfoldError: If a split is not in memory or a class is unknown.
    """
    if not classes:
        return data
    parts = {}
    for name in ("train", "val", "test"):
        part = getattr(data, name)
        if not isinstance(part, Split):
            raise EnfoldError(
                f"exclude_classes needs splits in memory, got {type(part).__name__} as {name}: "
                "return a Split, or exclude the classes in your function"
            )
        parts[name] = remove_classes(part, classes, data.known_classes())
    left = data.known_classes() - len(set(classes))
    return data.replace(**parts, num_classes=left, names=_remaining_names(data.names, classes))


def remove_classes(split: Split, classes: Sequence[int], num_classes: int) -> Split:
    """Return the examples of all other classes, renumbered from 0 in their order.

    Args:
        split: The split.
        classes: Indices of the classes to remove.
        num_classes: Number of classes.

    Raises:
        EnfoldError: If a class is unknown or fewer than 2 classes are left.
    """
    unknown = [each for each in classes if not 0 <= each < num_classes]
    if unknown:
        raise EnfoldError(
            f"exclude_classes must be from 0 to {num_classes - 1}, got {unknown[0]}: choose classes of the data"
        )
    others = [each for each in range(num_classes) if each not in set(classes)]
    if len(others) < 2:
        raise EnfoldError(
            f"exclude_classes must leave at least 2 of the {num_classes} classes, got {len(others)} left: "
            "exclude fewer classes"
        )
    number = torch.full((num_classes,), -1)
    number[others] = torch.arange(len(others))
    rest = split[number[split.labels] >= 0]
    return replace(rest, targets=number[rest.labels])


def _remaining_names(names: tuple[str, ...], classes: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for index, name in enumerate(names) if index not in set(classes))


def divide(split: Split, size: int, seed: int) -> tuple[Split, Split]:
    """Return the rest and a subset of `size` examples, stratified if there is one class per example."""
    has_classes = split.targets.ndim == 1 and not split.targets.is_floating_point() and bool((split.targets >= 0).all())
    labels = split.targets if has_classes else torch.zeros(len(split), dtype=torch.long)
    rest, part = stratified_split(labels, size, seed)
    return split[rest], split[part]


def _validation_size(size: int | float | None, available: int) -> int:
    if size is None:
        return max(1, min(VALIDATION_LIMIT, round(VALIDATION_FRACTION * available)))
    return resolve_size(size, available - 1, "val_size")


def _join(first: Split, second: Split) -> Split:
    return Split(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))


def _in_memory(part: Part, name: str) -> Split:
    if not isinstance(part, Split):
        raise EnfoldError(
            f"val_size and train_size need splits in memory, got {type(part).__name__} as {name}: "
            "return a Split, or choose the sizes in your function"
        )
    return part


def _check_shape(split: Split, train: Split, name: str, source: str) -> None:
    shape, expected = tuple(split.inputs.shape[1:]), tuple(train.inputs.shape[1:])
    if shape != expected or split.inputs.dtype != train.inputs.dtype:
        raise EnfoldError(
            f"all splits must have inputs of the same shape and type, got {split.inputs.dtype} {shape} in the {name} "
            f"split and {train.inputs.dtype} {expected} in the train split of {source}: save them in one format"
        )
