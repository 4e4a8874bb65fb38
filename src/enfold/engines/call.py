"""Call a network with one tensor, several inputs, keywords or an object, depending on its forward signature.

tensor or object    network(inputs)
tuple               network(*inputs), or network(inputs) if it takes a single input
dictionary          network(**inputs); a single entry of another name is passed by position, and an entry of another
                    name that is None is left out
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from enfold.data.tree import describe
from enfold.data.unpack import count_inputs
from enfold.errors import EnfoldError

_PARAMETERS: WeakKeyDictionary[type[nn.Module], tuple[dict[str, Any], int | None]] = WeakKeyDictionary()


def require_network(model: object, name: str = "model") -> None:
    """Raise an error that names the argument unless it is a network or an ensemble.

    Args:
        model: What the user passed.
        name: Name of the argument.
    """
    if isinstance(model, nn.Module):
        return
    several = " such as DeepEnsemble([a, b])" if isinstance(model, list | tuple) else ""
    raise EnfoldError(
        f"{name} must be a network or an ensemble, got {describe(model)}: pass a torch.nn.Module{several}"
    )


def call_network(network: Callable[..., Any], inputs: Any) -> Any:
    """Return the output of a network for inputs of any structure.

    Args:
        network: The network, or a function with its signature.
        inputs: A tensor, an object, a tuple of inputs, or a dictionary of keyword arguments.

    Raises:
        EnfoldError: If the network does not take a keyword of the inputs, or needs more inputs than one.
    """
    if isinstance(inputs, Tensor):
        return _call_with_one(network, inputs)
    if isinstance(inputs, Mapping):
        return _call_by_name(network, inputs)
    if type(inputs) in (tuple, list) and _parameters(network)[1] != 1:
        return network(*inputs)
    return _call_with_one(network, inputs)


def _call_with_one(network: Callable[..., Any], inputs: Any) -> Any:
    try:
        return network(inputs)
    except TypeError as error:
        parameters, required = _parameters(network)
        if required is None or required < 2:
            raise
        raise EnfoldError(
            f"inputs must be the {required} inputs of {type(network).__name__}.forward({', '.join(parameters)}), got "
            f"{describe(inputs)}: pass a tuple or dict of inputs, or unpack=, a function that returns them and the "
            "target of a batch"
        ) from error


def unwrap_inputs(network: nn.Module, inputs: Any) -> Any:
    """Return the tensor in a tuple or dictionary of one tensor if the network takes it as its first argument.

    Engines then run a dictionary of one tensor as they run the tensor. All other inputs are returned unchanged.

    Args:
        network: The network.
        inputs: Inputs of any structure.
    """
    is_plain = isinstance(inputs, Mapping) or type(inputs) in (tuple, list)
    if not is_plain or len(inputs) != 1:
        return inputs
    parameters, required = _parameters(network)
    if not isinstance(inputs, Mapping):
        return inputs if required == 1 or not isinstance(inputs[0], Tensor) else inputs[0]
    name, value = next(iter(inputs.items()))
    first = next(iter(parameters.values()), None)
    is_first = first is not None and first.name == name and first.kind is first.POSITIONAL_OR_KEYWORD
    return value if is_first and isinstance(value, Tensor) else inputs


def pack_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as one object for `call_network`."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    if args:
        raise EnfoldError(
            "the inputs of an ensemble must be given either by position or by keyword, got both: pass "
            "ensemble(**inputs) or ensemble(*inputs)"
        )
    return dict(kwargs)


def _call_by_name(network: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    parameters, required = _parameters(network)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    inputs = {name: value for name, value in inputs.items() if value is not None or name in parameters}
    unknown = [name for name in inputs if name not in parameters]
    if not unknown or takes_any:
        return network(**inputs)
    if len(inputs) == 1:
        return network(next(iter(inputs.values())))
    if required == 1 and len(unknown) == len(inputs):
        return network(inputs)
    raise EnfoldError(
        f"inputs must have the names of the network's arguments, got '{unknown[0]}' in {describe(inputs)} for "
        f"{type(network).__name__}.forward({', '.join(parameters)}): pass unpack=, a function that returns the inputs "
        "and the target of a batch"
    )


def _parameters(network: Callable[..., Any]) -> tuple[dict[str, Any], int | None]:
    """Return the parameters of the forward pass, and the number of inputs that it needs."""
    if not isinstance(network, nn.Module):
        return dict(inspect.signature(network).parameters), None
    if "forward" in vars(network):  # replaced for this network
        return dict(inspect.signature(network.forward).parameters), count_inputs(network)
    kind = type(network)
    if kind not in _PARAMETERS:
        try:
            _PARAMETERS[kind] = dict(inspect.signature(network.forward).parameters), count_inputs(network)
        except (TypeError, ValueError):
            _PARAMETERS[kind] = {}, 1
    return _PARAMETERS[kind]
