"""What a network returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returns: a tensor, or an object or dictionary with `logits`."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EnfoldError(
            f"a network must return a tensor of logits or an object with `logits`, got {type(output).__name__}: "
            "wrap it in a module that returns the logits"
        )
    return logits


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits as losses take them: of half precision as float32."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
