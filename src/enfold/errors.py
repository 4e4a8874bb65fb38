"""Exceptions and warnings; messages name the rule, the value and the remedy."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, ClassVar

WITHIN = (
    "enfold.",
    "functools",
    "contextlib",
    "torch.utils._contextlib",
    "torch.nn.modules.",
)  # modules whose lines are not informative for users


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, for a suggestion in an error message.

    Args:
        word: The unknown word.
        known: All known words.
    """
    return next(iter(get_close_matches(word, list(known), n=1)), None)


class EnfoldError(ValueError):
    """An error that the user can fix. The message names the rule, the invalid value and the remedy."""


class MissingExtra(EnfoldError, ImportError):
    """An optional package is needed, and not installed, or it cannot be imported."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        failure = sys.exc_info()[1]
        while failure is not None and (cause := failure.__cause__ or failure.__context__) is not None:
            failure = cause
        remedy = f"install it with  pip install 'enfold[{extra}]'"
        if isinstance(failure, ModuleNotFoundError) and failure.name:  # it may be one that the package needs
            package = failure.name.partition(".")[0]
        elif failure is not None and _is_installed(package):
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
            remedy = f"it is installed, but cannot be imported ({reason}); repair the package that this names"
        super().__init__(f"{purpose} needs the package '{package}': {remedy}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class UserCodeError(EnfoldError):
    """Code of the user raised an exception in a run; the message names its line."""


class WriteError(EnfoldError):
    """A file could not be written: the disk is full, or the folder is read-only, protected or missing."""

    REMEDIES: ClassVar = {
        errno.ENOSPC: "free some space and continue with the same command (a run with --resume)",
        errno.EDQUOT: "free some space and continue with the same command (a run with --resume)",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ELOOP: "remove the symbolic link",
        errno.ENOENT: "restore its folder, or choose another",
    }

    def __init__(self, path: object, error: Exception) -> None:
        self.errno = getattr(error, "errno", None)
        if self.errno is None and (code := re.search(r"os error (\d+)", str(error))):  # errors of safetensors
            self.errno = int(code[1])
        reason = os.strerror(self.errno) if self.errno else error
        remedy = self.REMEDIES.get(self.errno or 0, "choose a writable folder")
        super().__init__(f"'{path}' must be written, but that fails ({reason}): {remedy}")


class NonFiniteLoss(EnfoldError):
    """A training loss is NaN or infinite."""


class FailedMembers(EnfoldError):
    """Some members of an ensemble could not be trained on an executor; the others are usable.

    Args:
        message: The message.
        finished: Indices of the members that are trained.
        ensemble: The ensemble of these members; None if there are none.
    """

    def __init__(self, message: str, finished: Sequence[int], ensemble: Any) -> None:
        super().__init__(message)
        self.finished, self.ensemble = list(finished), ensemble


class SeparateModulesWarning(UserWarning):
    """Members run as separate modules, one after the other, because their networks do not run the same code."""


class WrongShape(EnfoldError, RuntimeError):
    """The network does not accept inputs of this shape."""


class UnsuitableNetwork(EnfoldError):
    """The network does not have what a method needs, such as a kind of layer; other networks are accepted."""


class UnsupportedOutput(EnfoldError):
    """The outputs are not logits of at least two classes with one row per example."""


class UnusedParameterWarning(UserWarning):
    """A member did not use a parameter in a batch in which other members did; the optimizer updates it anyway."""


class DroppedOutputWarning(UserWarning):
    """A network returns more than its logits, and the rest is not used."""


class PartialCoverageWarning(UserWarning):
    """The members of an efficient ensemble differ in less than half of the network's parameters."""


class InitialisationWarning(UserWarning):
    """The scale of a network's weights differs from the default initialization of its layers."""


class UnchangedWarning(UserWarning):
    """Training returned the initial weights: no epoch had a lower validation NLL."""


class LockWarning(UserWarning):
    """A run is on a file system without locks, or without locks that all its machines share."""


class EnvironmentWarning(UserWarning):
    """A training is resumed with other threads, another processor or another PyTorch: its bits may differ."""


def level_outside() -> int:
    """Return the `stacklevel` with which a warning points to the first line outside of enfold."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(WITHIN):
        level, frame = level + 1, frame.f_back
    return level
