"""What a network returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError, UnsupportedOutput


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returns: a tensor, or an object or dictionary with `logits`."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EnfoldError(
            f"a network must return a tensor of logits or an object with `logits`, got {type(output).__name__}: "
            "wrap it in a module that returns the logits"
        )
    return logits


def require_classes(logits: Tensor, purpose: str) -> Tensor:
    """The members' logits, (M, B, C), if they are those of classes.

    Raises:
        UnsupportedOutput: If they have other axes, as dense outputs have, or a single output.
    """
    if logits.ndim != 3 or logits.shape[-1] < 2:
        raise UnsupportedOutput(
            f"{purpose} needs the logits of at least 2 classes from each member, (members, batch, classes), got "
            f"outputs of shape {tuple(logits.shape)}: average the outputs yourself, or use a network with such logits"
        )
    return logits


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits as losses take them: of half precision as float32."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
