"""What the arguments of every network must satisfy; a wrong one is named before a layer is made."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

from enfold.errors import EnfoldError


def whole(**values: object) -> None:
    """Each value must be a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise EnfoldError(f"{name} must be a whole number of at least 1, got {value!r}: pass a positive integer")


def whole_list(name: str, values: object, shortest: int = 0) -> tuple[int, ...]:
    """A list of whole numbers of at least 1, as a tuple."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise EnfoldError(f"{name} must be a list of whole numbers, got {values!r}: pass for example [64, 32]")
    listed = tuple(values)
    if len(listed) < shortest:
        raise EnfoldError(f"{name} must have at least {shortest} entry, got {list(listed)}: pass for example [64]")
    for value in listed:
        whole(**{f"each of {name}": value})
    return listed


def fraction(**values: object) -> None:
    """Each value must be a number in [0, 1)."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
            raise EnfoldError(f"{name} must be at least 0 and below 1, got {value!r}: pass for example 0.1")


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """The value must be one of the choices."""
    if value not in choices:
        raise EnfoldError(f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of them")


def image_shape(shape: object) -> tuple[int, int, int]:
    """The shape of one image: (channels, height, width)."""
    if not isinstance(shape, Iterable) or isinstance(shape, str) or len(sides := tuple(shape)) != 3:
        raise EnfoldError(f"an image must have the shape (channels, height, width), got {shape!r}: pass all three")
    channels, height, width = sides
    whole(channels=channels, height=height, width=width)
    return channels, height, width
