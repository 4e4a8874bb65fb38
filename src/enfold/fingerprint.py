"""Fingerprint: a few outputs of an ensemble, stored with its values and compared when the values are loaded.

Values loaded into a network with another activation function, other heads or other constants give other outputs without
an error; the fingerprint detects this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from enfold.engines.compare import TOLERANCE
from enfold.engines.examples import Example, fix_rng
from enfold.engines.modes import eval_mode
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError

VALUES = 16  # stored outputs per member
MOST = 10_000_000  # numbers of one input


def compute_fingerprint(members: Ensemble) -> dict[str, Any] | None:
    """Return outputs in eval mode for random inputs similar to the first batch, as JSON values.

    Returns:
        None if the ensemble was never called, or if two calls give different outputs.
    """
    if members.example is None:
        return None
    first, second = (_compute_outputs(members, members.example) for _ in range(2))
    if first is None or second is None or not torch.equal(first, second):
        return None
    return {"inputs": asdict(members.example), "outputs": first.tolist()}


def require_fingerprint(members: Ensemble, stored: Mapping[str, Any], name: str) -> None:
    """Raise EnfoldError for members that give other outputs than the stored ones.

    Args:
        members: The loaded members.
        stored: The fingerprint of the saved ensemble.
        name: The file, for the message.

    Raises:
        EnfoldError: If a member gives other outputs than when it was saved.
    """
    try:
        example, expected = _read(stored)
        found = _compute_outputs(members, example)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:100]
        raise EnfoldError(
            f"the manifest of '{name}' must have the outputs of the members, but is damaged ({reason}): save it again"
        ) from error
    kind = next(members.parameters()).dtype if any(True for _ in members.parameters()) else torch.float32
    tolerance = max(TOLERANCE, 8 * torch.finfo(kind).eps) * float(expected.abs().max().clamp_min(1e-6))
    for index, outputs in enumerate(expected):
        if found is None or len(found) <= index or not torch.allclose(found[index], outputs, 0.0, tolerance):
            raise EnfoldError(
                f"members must give the outputs that they gave when '{name}' was saved, but those of member {index} "
                "differ: pass the network from which they were made, or a list of networks if the members differ"
            )


def _read(stored: Mapping[str, Any]) -> tuple[Example, Tensor]:
    """Return the inputs and the outputs (M, 16) of a manifest, which anybody may have written."""
    given, outputs = stored["inputs"], torch.tensor(stored["outputs"], dtype=torch.float32)
    shape = tuple(given["shape"])
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > MOST or outputs.ndim != 2:
        raise ValueError(f"shapes {str(shape)[:40]} and {tuple(outputs.shape)}")
    return Example(shape, str(given["dtype"]), float(given["low"]), float(given["high"])), outputs


@torch.no_grad()
def _compute_outputs(members: Ensemble, example: Example) -> Tensor | None:
    """Return outputs of shape (M, 16) in float32, or None if the ensemble fails or they are not finite."""
    inputs = example.inputs().to(next(iter(members.expand().values())).device)
    try:
        with eval_mode(members), fix_rng(inputs):
            outputs = members(inputs).flatten(1)[:, :VALUES].float().cpu()
    except (RuntimeError, IndexError, ValueError, TypeError):  # the network may not accept random inputs
        return None
    return outputs if bool(outputs.isfinite().all()) else None
