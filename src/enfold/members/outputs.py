"""What a network returns."""

from __future__ import annotations

from typing import Any

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
