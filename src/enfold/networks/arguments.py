"""Checks of the arguments of networks."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

from enfold.errors import EnfoldError


def require_positive(**values: object) -> None:
    """Check that each value is an integer of at least 1.

    Raises:
        EnfoldError: If one is not.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise EnfoldError(f"{name} must be an integer of at least 1, got {value!r}: pass a positive integer")


def positive_tuple(name: str, values: object, shortest: int = 0) -> tuple[int, ...]:
    """Return a list of positive integers as a tuple.

    Args:
        name: Name of the argument in error messages.
        values: The list.
        shortest: Minimum length.

    Raises:
        EnfoldError: If it is not a list of positive integers or too short.
    """
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise EnfoldError(f"{name} must be a list of integers, got {values!r}: pass for example [64, 32]")
    listed = tuple(values)
    if len(listed) < shortest:
        raise EnfoldError(f"{name} must have at least {shortest} entry, got {list(listed)}: pass for example [64]")
    for value in listed:
        require_positive(**{f"each of {name}": value})
    return listed


def require_fraction(**values: object) -> None:
    """Check that each value is a number in [0, 1).

    Raises:
        EnfoldError: If one is not.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
            raise EnfoldError(f"{name} must be at least 0 and below 1, got {value!r}: pass for example 0.1")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices.

    Raises:
        EnfoldError: If it is not.
    """
    if value not in choices:
        raise EnfoldError(f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of these")


def image_shape(shape: object) -> tuple[int, int, int]:
    """Return a shape as (channels, height, width).

    Raises:
        EnfoldError: If it is not three positive integers.
    """
    if not isinstance(shape, Iterable) or isinstance(shape, str) or len(sides := tuple(shape)) != 3:
        raise EnfoldError(f"shape must be (channels, height, width), got {shape!r}: pass three integers")
    channels, height, width = sides
    require_positive(channels=channels, height=height, width=width)
    return channels, height, width
