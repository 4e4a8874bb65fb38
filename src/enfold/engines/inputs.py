"""What a network is given."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

COMPUTED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # what layers compute in; others are storage

_WRITES: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()  # by whether it is in train mode


def call_protected(model: nn.Module, inputs: Tensor) -> Any:
    """Call the model such that the inputs stay as they are: one that works in place on them is given a copy.

    The first call in each mode is on a copy, whose version counter tells whether the model writes to its inputs.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(inputs):
        return model(inputs)
    known = _WRITES.setdefault(model, {})
    if model.training not in known:
        copy = _tracked_copy(inputs)
        version = copy._version
        output = model(copy)
        known[model.training] = copy._version != version
        return output
    return model(inputs.clone() if known[model.training] else inputs)


def _tracked_copy(inputs: Tensor) -> Tensor:
    """A copy that counts what is written to it, which tensors made in inference mode do not."""
    if not torch.is_inference_mode_enabled():
        return inputs.clone()
    with torch.inference_mode(False), torch.no_grad():
        return inputs.clone()


def in_type_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Floating-point inputs in the type of the model's first such parameter; whole numbers stay what they are."""
    if not inputs.is_floating_point():
        return inputs
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in COMPUTED), inputs.dtype)
    return inputs.to(kind)
