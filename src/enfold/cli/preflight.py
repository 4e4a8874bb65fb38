"""What can be checked before anything is done."""

from __future__ import annotations

import torch

from enfold.errors import EnfoldError


def check_device(device: str) -> None:
    """A device must be there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EnfoldError(
            f"the device must be one that this machine has, got '{device}' ({reason}): use cpu"
        ) from error
