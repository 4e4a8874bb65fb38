"""What a network is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

COMPUTED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # what layers compute in; others are storage


def in_type_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Floating-point inputs in the type of the model's first such parameter; whole numbers stay what they are."""
    if not inputs.is_floating_point():
        return inputs
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in COMPUTED), inputs.dtype)
    return inputs.to(kind)
