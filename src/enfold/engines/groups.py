"""Parameter groups: what an optimizer is told about parameters it cannot see from their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

Decay = Literal["all", "weights"]


def decay_groups(
    parameters: Iterable[tuple[Tensor, int]], weight_decay: float, decay: Decay, **declared: Any
) -> list[dict[str, Any]]:
    """One group, or two if only weights (two axes or more in the network) are decayed, not biases and norms."""
    listed = list(parameters)
    if decay == "all":
        return [{"params": [tensor for tensor, _ in listed], "weight_decay": weight_decay, **declared}]
    weights = [tensor for tensor, axes in listed if axes >= 2]
    others = [tensor for tensor, axes in listed if axes < 2]
    return [
        {"params": weights, "weight_decay": weight_decay, **declared},
        {"params": others, "weight_decay": 0.0, **declared},
    ]
