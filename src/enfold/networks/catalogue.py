"""The catalogue of networks: create a network from its name, its arguments and the shape of the data."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from enfold.errors import EnfoldError, closest
from enfold.networks.arguments import positive_tuple, require_positive
from enfold.networks.bottleneck_resnet import BottleneckResNet
from enfold.networks.fast_resnet import FastResNet
from enfold.networks.medium_cnn import MediumCNN, SmallCNN
from enfold.networks.mlp import MLP
from enfold.networks.resnet import ResNet
from enfold.networks.vit import ViT
from enfold.networks.wide_resnet import WideResNet

Spec = str | Mapping[str, Any]
"""A network in a recipe: a name, a mapping of its name and arguments, or "module:function"."""

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "small-cnn": SmallCNN,
    "medium-cnn": MediumCNN,
    "resnet": ResNet,
    "resnet20": ResNet,
    "resnet50": BottleneckResNet,
    "fast-resnet": FastResNet,
    "wide-resnet": WideResNet,
    "vit": ViT,
}
"""The networks of the catalogue by name."""

WIDE_RESNET = re.compile(r"(?:wrn|wide-resnet)-(\d+)-(\d+)")  # wrn-28-10


def make(spec: Spec, data_shape: Sequence[int], num_classes: int | None) -> nn.Module:
    """Return a new network for a spec; the arguments are those of `factory`.

    Args:
        spec: Name of a network, or a mapping of its name and arguments.
        data_shape: Shape of one input.
        num_classes: Number of classes; None for one output.
    """
    return factory(spec, data_shape, num_classes)()


def factory(spec: Spec, data_shape: Sequence[int], num_classes: int | None) -> Callable[[], nn.Module]:
    """Return a function that creates a network with new initial weights on every call.

    Args:
        spec: A name from `NETWORKS`; "wrn-28-10" for a WideResNet of depth 28 and widen factor 10; a mapping of a name
            and arguments such as ``{"name": "mlp", "widths": [256, 256]}``; or a reference to user code,
            "module:function" or "file.py:function". If that function has parameters `shape` and `num_classes`, they
            are filled from the data.
        data_shape: Shape of one input, without the batch axis; empty for inputs that are not one tensor, which user
            code alone can take.
        num_classes: Number of outputs: classes, or the outputs that another task needs; None if unknown, which is
            accepted for user code.

    Raises:
        EnfoldError: If the name or an argument is unknown or does not fit the data.
    """
    name, arguments = _parse_spec(spec)
    if ":" in name and (not data_shape or num_classes is None):
        known_parts = {"shape": tuple(data_shape) or None, "num_classes": num_classes}
        return _user_factory(name, arguments, {key: each for key, each in known_parts.items() if each is not None})
    shape = positive_tuple("data_shape", data_shape, shortest=1)
    require_positive(num_classes=num_classes)
    if ":" in name:
        return _user_factory(name, arguments, {"shape": shape, "num_classes": num_classes})
    if name not in NETWORKS:
        raise EnfoldError(
            f"there is no network {name!r}{_nearest(name, NETWORKS)}: choose one of {', '.join(NETWORKS)}, "
            "wrn-28-10, or a reference to user code as file.py:function"
        )
    network = NETWORKS[name]
    accepted = inspect.signature(network).parameters
    if accepted.keys() & {"shape", "in_channels"} and len(shape) != 3:
        raise EnfoldError(
            f"data_shape must be (channels, height, width) for the network {name!r}, got {shape}: "
            "reshape the data or choose 'mlp'"
        )
    known = {
        "in_features": math.prod(shape),
        "in_channels": shape[0],
        "shape": shape,
        "num_classes": num_classes,
    }
    derived = {key: value for key, value in known.items() if key in accepted}
    _check_names(name, arguments, [key for key in accepted if key not in derived], derived)
    return partial(network, **derived, **arguments)


def _parse_spec(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a spec; "wrn-28-10" becomes depth and widen factor."""
    arguments = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise EnfoldError(f"a network must have a name, got {spec!r}: write for example {{'name': 'mlp'}}")
    if match := WIDE_RESNET.fullmatch(name):
        if twice := sorted(arguments.keys() & {"depth", "widen_factor"}):
            raise EnfoldError(
                f"{' and '.join(twice)} must not be given for {name!r}, whose name contains it, got it as an argument: "
                "omit it"
            )
        return "wide-resnet", {"depth": int(match[1]), "widen_factor": int(match[2]), **arguments}
    return name, arguments


def _user_factory(reference: str, arguments: dict[str, Any], known: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a factory that calls the user's function."""
    from enfold.io.usercode import resolve

    function = resolve(reference)
    if not callable(function) or isinstance(function, nn.Module):
        raise EnfoldError(
            f"{reference!r} must be a function or class that creates a network, got "
            f"{type(function).__name__}: refer to a function that returns a new network on every call"
        )
    signature = inspect.signature(function)
    parameters = signature.parameters
    derived = {key: value for key, value in known.items() if key in parameters and key not in arguments}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        _check_names(reference, arguments, list(parameters), {})
    try:
        signature.bind(**derived, **arguments)
    except TypeError as error:
        raise EnfoldError(
            f"{reference!r} must be callable with shape and num_classes and the arguments of the spec, got {error}: "
            "add the missing arguments to the spec or give them defaults"
        ) from error
    return partial(_create, reference, partial(function, **derived, **arguments))


def _create(reference: str, function: Callable[[], Any]) -> nn.Module:
    from enfold.io.usercode import call

    network = call(reference, function)
    if not isinstance(network, nn.Module):
        raise EnfoldError(
            f"{reference!r} must return a torch.nn.Module, got {type(network).__name__}: return the network itself"
        )
    return network


def _check_names(name: str, arguments: Iterable[str], accepted: Sequence[str], derived: Iterable[str]) -> None:
    for argument in arguments:
        if argument in derived:
            raise EnfoldError(
                f"{argument} of the network {name!r} is derived from the data, got it as an argument: omit it"
            )
        if argument not in accepted:
            choices = f"choose from {', '.join(accepted)}" if accepted else "it takes none"
            raise EnfoldError(
                f"the network {name!r} has no argument {argument!r}{_nearest(argument, accepted)}: {choices}"
            )


def _nearest(word: str, choices: Iterable[str]) -> str:
    near = closest(str(word), choices)
    return f" (did you mean {near!r}?)" if near else ""
