"""What can be checked before anything is done."""

from __future__ import annotations

from pathlib import Path

import torch

from enfold.errors import EnfoldError
from enfold.run import Recipe


def check_device(device: str) -> None:
    """A device must be there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EnfoldError(
            f"the device must be one that this machine has, got '{device}' ({reason}): use cpu"
        ) from error


def require_trust(recipe: Recipe, trusted: bool, where: Path) -> None:
    """No file that a user opens runs code unasked."""
    references = recipe.runs_code()
    if references and not trusted:
        raise EnfoldError(
            f"a recipe runs no code unasked, but that of '{where}' names {references[0]}: "
            "add --trust-code if you know that code"
        )
