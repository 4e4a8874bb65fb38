"""Precision of a forward pass: float32, or mixed precision by PyTorch's autocast, whose weights stay in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from enfold.errors import EnfoldError

Precision = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def require_precision(precision: str) -> str:
    """Return the complete name of a precision; raises EnfoldError if there is no such precision."""
    name = PRECISIONS.get(precision, precision)
    if name not in PRECISIONS.values():
        raise EnfoldError(
            f"precision must be one of {', '.join((*PRECISIONS.values(), *PRECISIONS))}, got {precision!r}: choose one"
        )
    return name


def autocast(precision: str, device: str | torch.device) -> AbstractContextManager[object]:
    """Return the context in which a forward pass has this precision."""
    name = require_precision(precision)
    if name == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, name))
