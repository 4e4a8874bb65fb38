"""Outputs of a network: the logits in them, and their shape."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from enfold.errors import DroppedOutputWarning, EnfoldError, UnsupportedOutput, level_outside

_WARNED: set[tuple[str, ...]] = set()  # the kinds of outputs for which a warning was given


def get_logits(output: Any) -> Tensor:
    """Return the logits in the output of a network: a tensor, or an object or dictionary with `logits`.

    Other entries are neither returned nor trained; one warning names them.

    Raises:
        EnfoldError: If the output has no logits.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EnfoldError(
            f"a network must return a tensor of logits or an object with `logits`, got {type(output).__name__}: "
            "wrap it in a module that returns the logits"
        )
    if not torch.compiler.is_compiling():
        _warn_of_dropped(output)
    return logits


def _warn_of_dropped(output: Any) -> None:
    """Warn about dropped entries, once for each kind of output."""
    fields = output if isinstance(output, dict) else output._asdict() if hasattr(output, "_asdict") else _fields(output)
    names = tuple(str(name) for name, value in fields.items() if str(name) != "logits" and value is not None)
    kind = (type(output).__qualname__, *names)
    if names and kind not in _WARNED:
        _WARNED.add(kind)
        warnings.warn(
            f"a network returns {', '.join(names)} beside logits ({type(output).__name__}), of which members use "
            "only the logits: train the others yourself, or wrap the network in a module that returns one tensor",
            DroppedOutputWarning,
            stacklevel=level_outside(),
        )


def _fields(output: object) -> dict[str, Any]:
    return {name: value for name, value in getattr(output, "__dict__", {}).items() if not name.startswith("_")}


def require_classes(logits: Tensor, purpose: str) -> Tensor:
    """Return the members' logits, (M, B, C), if they are logits of classes.

    Raises:
        UnsupportedOutput: If they have another number of axes, as dense outputs, or a single class.
    """
    if logits.ndim != 3 or logits.shape[-1] < 2:
        raise UnsupportedOutput(
            f"{purpose} needs the logits of at least 2 classes from each member, (members, batch, classes), got "
            f"outputs of shape {tuple(logits.shape)}: average the outputs yourself, or use a network with such logits"
        )
    return logits


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits for a loss: half precision as float32, others unchanged."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
