"""Outputs of a network: the logits in them, and their shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import describe
from enfold.errors import DroppedOutputWarning, EnfoldError, UnsupportedOutput, level_outside

_WARNED: set[tuple[str, ...]] = set()  # the kinds of outputs for which a warning was given


OUTPUT = "enfold_output"  # the attribute of a network with the function given to `set_output`


def set_output(network: nn.Module, function: Callable[[Any], Tensor]) -> None:
    """Set the function that selects the output that is trained and predicted from what a network returns.

    It is needed for networks that return neither a tensor, nor a tuple of one tensor, nor an object or dictionary with
    `logits`. Copies of the network keep it.

    Args:
        network: The network.
        function: Function from what the network returns to a tensor (B, ...).
    """
    vars(network)[OUTPUT] = function


def get_output(network: nn.Module) -> Callable[[Any], Tensor] | None:
    """Return the function that `set_output` gave for a network, or None."""
    return vars(network).get(OUTPUT)


def get_logits(output: Any, network: Any = None) -> Tensor:
    """Return the tensor that is trained and predicted from the output of a network.

    It is the output itself, the only element of a tuple, or the entry `logits` of an object or dictionary, unless
    `set_output` gave another function for the network. Other entries are neither returned nor trained; one warning
    names them.

    Raises:
        EnfoldError: If there is no such tensor.
    """
    function = getattr(network, "__dict__", {}).get(OUTPUT)
    if function is not None:
        return _require_tensor(function(output), "the function passed as outputs=")
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and len(output) == 1 and isinstance(output[0], Tensor):
        return output[0]
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    logits = _require_tensor(logits, "a network", output)
    if not torch.compiler.is_compiling():
        _warn_of_dropped(output)
    return logits


def _require_tensor(found: Any, who: str, output: Any = None) -> Tensor:
    if isinstance(found, Tensor):
        return found
    given = found if output is None else output
    raise EnfoldError(
        f"{who} must return a tensor, a tuple of one tensor or an object with `logits`, got {describe(given)}: pass "
        "outputs=, a function that selects one tensor"
    )


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
