"""The one exception a user can cause: a sentence with the rule, the value and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

WITHIN = ("enfold.", "functools", "torch.utils._contextlib")  # modules whose lines tell a user nothing


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, for an error's remedy."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


class EnfoldError(ValueError):
    """Something the user can mend. Its message names the rule, the offending value and the remedy."""


class MissingExtra(EnfoldError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': install it with  pip install 'enfold[{extra}]'")


class NonFiniteLoss(EnfoldError):
    """Training met a loss that is not a number or infinite."""


class SeparateModulesWarning(UserWarning):
    """Members run as separate modules, one after the other, because their networks do not run the same code."""


class WrongShape(EnfoldError, RuntimeError):
    """Inputs of a shape that a network cannot take."""


def level_outside() -> int:
    """The `stacklevel` of a warning that is to point to the line outside of enfold which led to it."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(WITHIN):
        level, frame = level + 1, frame.f_back
    return level
