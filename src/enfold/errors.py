"""The one exception a user can cause: a sentence with the rule, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


class WrongShape(EnfoldError, RuntimeError):
    """Inputs of a shape that a network cannot take."""
