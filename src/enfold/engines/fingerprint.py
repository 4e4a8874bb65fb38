"""Fingerprint: a few outputs of an ensemble, stored with its values and compared when the values are loaded.

Values loaded into a network with another activation function, other heads or other constants give other outputs without
an error; the fingerprint detects this.
"""

from __future__ import annotations

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


def require_fingerprint(members: Ensemble, stored: dict[str, Any], name: str) -> None:
    """Raise EnfoldError for members that give other outputs than the stored ones.

    Args:
        members: The loaded members.
        stored: The fingerprint of the saved ensemble.
        name: The file, for the message.

    Raises:
        EnfoldError: If a member gives other outputs than when it was saved.
    """
    given = stored["inputs"]
    example = Example(tuple(given["shape"]), str(given["dtype"]), float(given["low"]), float(given["high"]))
    found, expected = _compute_outputs(members, example), torch.tensor(stored["outputs"])
    kind = next(members.parameters()).dtype if any(True for _ in members.parameters()) else torch.float32
    tolerance = max(TOLERANCE, 8 * torch.finfo(kind).eps) * float(expected.abs().max().clamp_min(1e-6))
    for index, outputs in enumerate(expected):
        if found is None or len(found) <= index or not torch.allclose(found[index], outputs, 0.0, tolerance):
            raise EnfoldError(
                f"members must give the outputs that they gave when '{name}' was saved, but those of member {index} "
                "differ: pass the network from which they were made, or a list of networks if the members differ"
            )


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
