"""What an ensemble computes, in a few numbers: stored with its values, and compared when these are loaded again.

Values say nothing about the code that uses them. Loaded into a network with another activation function, other heads or
other constants, they give other outputs without an error; a fingerprint shows it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from enfold.engines.modes import evaluating
from enfold.engines.trial import Example
from enfold.engines.verify import TOLERANCE, fixed_draws
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError

VALUES = 16  # outputs kept of each member


def fingerprint(members: Ensemble) -> dict[str, Any] | None:
    """Return what members give in eval mode for inputs like their first ones, as JSON can hold it.

    Returns:
        None if they were never called, or if two calls give different outputs.
    """
    if members.example is None:
        return None
    first, second = (_outputs(members, members.example) for _ in range(2))
    if first is None or second is None or not torch.equal(first, second):
        return None
    return {"inputs": asdict(members.example), "outputs": first.tolist()}


def require_fingerprint(members: Ensemble, stored: dict[str, Any], name: str) -> None:
    """Refuse members that do not compute what was stored.

    Args:
        members: The loaded members.
        stored: What `fingerprint` returned when they were saved.
        name: The file, for the message.

    Raises:
        EnfoldError: If a member gives other outputs than when it was saved.
    """
    given = stored["inputs"]
    example = Example(tuple(given["shape"]), str(given["dtype"]), float(given["low"]), float(given["high"]))
    found, expected = _outputs(members, example), torch.tensor(stored["outputs"])
    kind = next(members.parameters()).dtype if any(True for _ in members.parameters()) else torch.float32
    tolerance = max(TOLERANCE, 8 * torch.finfo(kind).eps) * float(expected.abs().max().clamp_min(1e-6))
    for index, outputs in enumerate(expected):
        if found is None or len(found) <= index or not torch.allclose(found[index], outputs, 0.0, tolerance):
            raise EnfoldError(
                f"members must compute what they did when '{name}' was saved, but member {index} gives other outputs: "
                "pass the network they were made from, or a list of one network a member if these differ"
            )


@torch.no_grad()
def _outputs(members: Ensemble, example: Example) -> Tensor | None:
    """(M, 16) of float32, or None where there are no such finite numbers."""
    inputs = example.inputs().to(next(iter(members.expand().values())).device)
    try:
        with evaluating(members), fixed_draws(inputs):
            outputs = members(inputs).flatten(1)[:, :VALUES].float().cpu()
    except (RuntimeError, IndexError, ValueError, TypeError):  # random inputs may be none that the network can take
        return None
    return outputs if bool(outputs.isfinite().all()) else None
