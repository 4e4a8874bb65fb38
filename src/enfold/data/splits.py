"""Stratified splits, reproducible by seed on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold import seeds
from enfold.errors import EnfoldError


def stratified_split(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the rest and of `size` held-out examples, both ascending and stratified by class.

    Every class retains at least one example in the rest if `size` allows it.

    Args:
        labels: Labels of all examples.
        size: Number of held-out examples.
        seed: Seed of the choice.

    Raises:
        EnfoldError: If `size` is not between 1 and the number of examples minus 1.
    """
    if not 0 < size < len(labels):
        raise EnfoldError(
            f"size must be between 1 and {len(labels) - 1} for {len(labels)} examples, got {size}: change size"
        )
    counts = torch.bincount(labels)
    shuffled = torch.randperm(len(labels), generator=seeds.generator(seed, "stratified split"))
    grouped = shuffled[torch.argsort(labels[shuffled], stable=True)]  # by class, shuffled within each
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for group, number in zip(grouped.split(counts.tolist()), proportional(counts.tolist(), size), strict=True):
        held_out[group[:number]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def fold_numbers(size: int, folds: int, seed: int = 0) -> Tensor:
    """Return the fold of each example, (N,): random, of equal sizes up to one example.

    `fit(ensemble, train, folds=folds, seed=seed)` trains member k on all examples but those of fold k.

    Args:
        size: Number of examples.
        folds: Number of folds.
        seed: Seed of the choice, that of the training.

    Raises:
        EnfoldError: If there are fewer than 2 folds, or fewer examples than folds.
    """
    if not 2 <= folds <= size:
        raise EnfoldError(f"folds must be between 2 and the {size} examples, got {folds}: change folds")
    numbers = torch.empty(size, dtype=torch.long)
    numbers[torch.randperm(size, generator=seeds.generator(seed, "folds"))] = torch.arange(size) % folds
    return numbers


def proportional(counts: list[int], size: int) -> list[int]:
    """Return the number of examples of each class, which sum to `size`; the largest remainders are rounded up."""
    total = sum(counts)
    quotas = [count * size / total for count in counts]
    numbers = [count * size // total for count in counts]
    spare_one = size <= sum(max(count - 1, 0) for count in counts)
    limits = [count - 1 if spare_one else count for count in counts]
    for _ in range(size - sum(numbers)):
        open_classes = (c for c in range(len(counts)) if numbers[c] < limits[c])
        numbers[max(open_classes, key=lambda c: quotas[c] - numbers[c])] += 1
    return numbers


def resolve_size(size: int | float, available: int, what: str) -> int:
    """Return a number of examples from a number or a fraction.

    Args:
        size: Number of examples, or a fraction between 0 and 1 of the available ones.
        available: Number of available examples.
        what: Name of the argument in error messages.

    Raises:
        EnfoldError: If `size` is invalid or more than is available.
    """
    number = round(size * available) if isinstance(size, float) and 0 < size < 1 else size
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise EnfoldError(
            f"{what} must be a number of examples or a fraction between 0 and 1 that gives at least one, "
            f"got {size!r}: pass for example 1000 or 0.1"
        )
    if number > available:
        raise EnfoldError(f"{what} must be at most {available}, the number of examples, got {size!r}: lower it")
    return number
