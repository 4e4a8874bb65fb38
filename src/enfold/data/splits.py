"""Splits: seeded, stratified, and the same for the same seed on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold import seeds
from enfold.errors import EnfoldError


def stratified_split(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the rest and of `size` examples held out, both ascending, with the classes in proportion.

    No class loses its last example to the part held out as long as that leaves `size` examples to take.
    """
    if not 0 < size < len(labels):
        raise EnfoldError(
            f"a split must hold out between 1 and {len(labels) - 1} of {len(labels)} examples, got {size}: "
            "choose another size"
        )
    counts = torch.bincount(labels)
    shuffled = torch.randperm(len(labels), generator=seeds.generator(seed, "stratified split"))
    grouped = shuffled[torch.argsort(labels[shuffled], stable=True)]  # by class, in random order within each
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for group, share in zip(grouped.split(counts.tolist()), proportional(counts.tolist(), size), strict=True):
        held_out[group[:share]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def proportional(counts: list[int], size: int) -> list[int]:
    """How many of each class to take so that they sum to `size`: the largest remainders are rounded up."""
    total = sum(counts)
    quotas = [count * size / total for count in counts]
    shares = [count * size // total for count in counts]
    spare_one = size <= sum(max(count - 1, 0) for count in counts)
    room = [count - 1 if spare_one else count for count in counts]
    for _ in range(size - sum(shares)):
        open_classes = (c for c in range(len(counts)) if shares[c] < room[c])
        shares[max(open_classes, key=lambda c: quotas[c] - shares[c])] += 1
    return shares


def resolve_size(size: int | float, available: int, what: str) -> int:
    """A number of examples from a number or, if it is a float, from a fraction of those available."""
    number = round(size * available) if isinstance(size, float) and 0 < size < 1 else size
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise EnfoldError(
            f"{what} must be a whole number of examples or a fraction between 0 and 1 that leaves at least one, "
            f"got {size!r}: pass for example 1000 or 0.1"
        )
    if number > available:
        raise EnfoldError(f"{what} must be at most {available}, which is all there is, got {size!r}: ask for fewer")
    return number
