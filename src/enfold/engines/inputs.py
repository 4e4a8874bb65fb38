"""Inputs of a network: their type, in-place modifications of them, and errors about their shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from enfold.data.arrays import as_inputs
from enfold.data.tree import clone, describe, map_tensors, tensors
from enfold.engines.call import call_network
from enfold.errors import EnfoldError, WrongShape

COMPUTED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # dtypes in which layers compute
ABOUT_SHAPES = re.compile(r"shape|size|dimension|channels|\dD\b", re.IGNORECASE)
AXES: dict[type[nn.Module], str] = {
    nn.Conv1d: "length",
    nn.Conv2d: "height, width",
    nn.Conv3d: "depth, height, width",
}

_WRITES: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()  # by network, then by its mode


def call_protected(model: nn.Module, inputs: Any) -> Any:
    """Call a model without modifying the inputs: a model that works on them in place gets a copy.

    The first call in train mode and the first call in eval mode use `call_and_watch`.
    """
    if torch.compiler.is_compiling() or _is_transformed(inputs):
        return call_network(model, inputs)
    writes = _WRITES.get(model, {}).get(model.training)
    if writes is None:
        output, writes = call_and_watch(model, inputs)
        record_input_writes(model, model.training, writes)
        return output
    return call_network(model, clone(inputs) if writes else inputs)


def _is_transformed(inputs: Any) -> bool:
    """Return whether tensors of the inputs belong to a transformation such as torch.vmap."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors(inputs))


def call_and_watch(call: Callable[..., Any], inputs: Any) -> tuple[Any, bool]:
    """Call a network on a copy of the inputs; return its output, and whether it modified the copy in place."""
    needs_gradient = any(tensor.requires_grad for tensor in tensors(inputs))
    # Tensors made in inference mode do not count their versions.
    with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled() and needs_gradient):
        copy = clone(inputs)
    before = [(tensor, tensor._version) for tensor in tensors(copy)]
    output = call_network(call, copy)
    return output, any(tensor._version != version for tensor, version in before)


def record_input_writes(network: nn.Module, training: bool, writes: bool) -> None:
    """Record whether a network modifies its inputs in place in train or eval mode."""
    known = _WRITES.setdefault(network, {})
    known[training] = known.get(training, False) or writes


def has_input_writes(network: nn.Module) -> bool:
    """Return whether a call of the network was seen to modify its inputs in place, in either mode."""
    return any(_WRITES.get(network, {}).values())


def copy_write_record(network: nn.Module, duplicate: nn.Module) -> None:
    """Record for a copy of a network what is known about the network."""
    if network in _WRITES:
        _WRITES[duplicate] = dict(_WRITES[network])


def in_type_of(model: nn.Module, inputs: Any) -> Any:
    """Return floating-point inputs in the dtype of the model's first floating-point parameter, others unchanged."""
    if not any(tensor.is_floating_point() for tensor in tensors(inputs)):
        return inputs
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in COMPUTED), None)
    if kind is None or all(tensor.dtype == kind for tensor in tensors(inputs) if tensor.is_floating_point()):
        return inputs
    return map_tensors(lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor, inputs)


def from_arrays(model: nn.Module, inputs: Any) -> Any:
    """Return inputs with numpy arrays as tensors on the device of the model, converted as those of data sets.

    Args:
        model: A network or an ensemble.
        inputs: An array, or a tuple, list or mapping with arrays; anything else is returned unchanged.

    Raises:
        EnfoldError: If an array is not one of numbers with one row per example.
    """
    if isinstance(inputs, np.ndarray):
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        return as_inputs(inputs, "inputs").to(device)
    if isinstance(inputs, Mapping) and any(isinstance(each, np.ndarray) for each in inputs.values()):
        return {name: from_arrays(model, each) for name, each in inputs.items()}
    if type(inputs) in (tuple, list) and any(isinstance(each, np.ndarray) for each in inputs):
        return type(inputs)(from_arrays(model, each) for each in inputs)
    return inputs


def refuse_shape(model: nn.Module, inputs: Any, error: Exception) -> None:
    """Raise `WrongShape` from the error of a first forward pass if it is about shapes, else return.

    Args:
        model: A network or an ensemble.
        inputs: The inputs (B, ...) for which it failed.
        error: The exception.

    Raises:
        WrongShape: With the shape of an input, the first layer's size and torch's message.
    """
    if isinstance(error, EnfoldError | torch.OutOfMemoryError) or not ABOUT_SHAPES.search(str(error)):
        return
    codes = getattr(model, "codes", None)  # of an ensemble
    network = codes[0].network if codes else model
    message = " ".join(str(error).split())
    given = f"shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else describe(inputs)
    raise WrongShape(
        f"inputs must have the shape that the network takes, but {type(network).__name__}{_describe_first(network)} "
        f"fails on inputs of {given} ({type(error).__name__}: {message}): change the network, or reshape the data"
    ) from error


def _describe_first(network: nn.Module) -> str:
    """Return the input size of the first layer, for an error message."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            return f", whose first layer takes {module.in_features} features,"
        axes = AXES.get(type(module))
        if axes is not None:
            return f", whose first layer takes ({module.in_channels}, {axes}),"
    return ""
