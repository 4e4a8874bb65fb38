"""From what a source holds to the three parts of a run: test stays apart, validation comes out of train."""

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
TEST_SEED = 0  # not the run's: what one run is judged by, no other run may have learnt from


@dataclass(frozen=True)
class Parts:
    """What a source holds: a training part, and the other parts if it brings its own."""

    train: Split
    val: Split | None
    test: Split | None
    num_classes: int
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
    """Check every part, split off those that are missing, and measure mean and deviation on the training part.

    Classes are left out after the test part is set aside: what is left of it is the same with and without them.
    """
    for name in ("train", "val", "test"):
        split = getattr(parts, name)
        if split is not None:
            check_split(split, parts.num_classes, f"the {name} part of {parts.source}")
            _check_shape(split, parts.train, name, parts.source)
    train, test = parts.train, parts.test
    if test is None:
        size = resolve_size(TEST_FRACTION, len(train), "the test part")
        train, test = divide(train, size, TEST_SEED)
    own, names, num_classes = parts.val, parts.names, parts.num_classes
    if exclude_classes:
        train, test = (without_classes(each, exclude_classes, num_classes) for each in (train, test))
        own = None if own is None else without_classes(own, exclude_classes, num_classes)
        names, num_classes = _other_names(names, exclude_classes), num_classes - len(set(exclude_classes))
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
    """Training and validation part; a source's own validation part is kept unless another size is asked for."""
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
    """The user's own data with another validation part or less to train on."""
    if val_size is None and train_size is None:
        return data
    train, own = _in_memory(data.train, "train"), _in_memory(data.val, "val")
    train, held_out = resplit(train, own, val_size, seed, train_size)
    return data.replace(train=train, val=held_out)


def without(data: Data, classes: Sequence[int]) -> Data:
    """The user's own data without some classes, the others numbered anew; mean and deviation stay as they were."""
    if not classes:
        return data
    parts = {}
    for name in ("train", "val", "test"):
        part = getattr(data, name)
        if not isinstance(part, Split):
            raise EnfoldError(
                f"exclude_classes needs tensors in memory, got {type(part).__name__} as the {name} part: "
                "return a Split there, or leave the classes out in your own function"
            )
        parts[name] = without_classes(part, classes, data.known_classes())
    left = data.known_classes() - len(set(classes))
    return data.replace(**parts, num_classes=left, names=_other_names(data.names, classes))


def without_classes(split: Split, classes: Sequence[int], num_classes: int) -> Split:
    """The examples of all other classes, numbered anew from 0 in their order."""
    unknown = [each for each in classes if not 0 <= each < num_classes]
    if unknown:
        raise EnfoldError(
            f"exclude_classes must be from 0 to {num_classes - 1}, got {unknown[0]}: choose among the data's own"
        )
    others = [each for each in range(num_classes) if each not in set(classes)]
    if len(others) < 2:
        raise EnfoldError(
            f"at least 2 of the {num_classes} classes must be left to learn, but {len(others)} would be: "
            "exclude fewer classes"
        )
    number = torch.full((num_classes,), -1)
    number[others] = torch.arange(len(others))
    rest = split[number[split.labels] >= 0]
    return replace(rest, labels=number[rest.labels])


def _other_names(names: tuple[str, ...], classes: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for index, name in enumerate(names) if index not in set(classes))


def divide(split: Split, size: int, seed: int) -> tuple[Split, Split]:
    """The rest and a stratified part of `size` examples."""
    rest, part = stratified_split(split.labels, size, seed)
    return split[rest], split[part]


def _validation_size(asked: int | float | None, available: int) -> int:
    if asked is None:
        return max(1, min(VALIDATION_LIMIT, round(VALIDATION_FRACTION * available)))
    return resolve_size(asked, available - 1, "val_size")


def _join(first: Split, second: Split) -> Split:
    return Split(torch.cat([first.inputs, second.inputs]), torch.cat([first.labels, second.labels]))


def _in_memory(part: Part, name: str) -> Split:
    if not isinstance(part, Split):
        raise EnfoldError(
            f"val_size= and train_size= need tensors in memory, got {type(part).__name__} as the {name} part: "
            "return a Split there, or choose the sizes in your own function"
        )
    return part


def _check_shape(split: Split, train: Split, name: str, source: str) -> None:
    shape, expected = tuple(split.inputs.shape[1:]), tuple(train.inputs.shape[1:])
    if shape != expected or split.inputs.dtype != train.inputs.dtype:
        raise EnfoldError(
            f"every part must hold inputs of one shape and type, got {split.inputs.dtype} {shape} in the {name} part "
            f"and {train.inputs.dtype} {expected} in the train part of {source}: save them alike"
        )
