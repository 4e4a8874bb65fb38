"""The catalogue: a network's name and arguments, and the shape of the data, become the network."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from enfold.errors import EnfoldError, closest
from enfold.networks.arguments import whole, whole_list
from enfold.networks.medium_cnn import MediumCNN, SmallCNN
from enfold.networks.mlp import MLP
from enfold.networks.resnet import ResNet
from enfold.networks.vit import ViT
from enfold.networks.wide_resnet import WideResNet

Spec = str | Mapping[str, Any]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "small-cnn": SmallCNN,
    "medium-cnn": MediumCNN,
    "resnet": ResNet,
    "resnet20": ResNet,
    "wide-resnet": WideResNet,
    "vit": ViT,
}

WIDE_RESNET = re.compile(r"(?:wrn|wide-resnet)-(\d+)-(\d+)")  # wrn-28-10


def make(spec: Spec, data_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The network of a spec for inputs of this shape (without the batch axis); see `factory`."""
    return factory(spec, data_shape, num_classes)()


def factory(spec: Spec, data_shape: Sequence[int], num_classes: int) -> Callable[[], nn.Module]:
    """A function that makes the network of a spec anew, with new initial weights, each time it is called.

    A spec is a name of `NETWORKS`; "wrn-28-10" for a WideResNet of depth 28 and widen factor 10; a mapping of
    a name and arguments such as ``{"name": "mlp", "widths": [256, 256]}``; or a reference to your own code,
    "module:function" or "file.py:function". Your function may take parameters named `shape` and
    `num_classes`: they are filled from the data.
    """
    name, arguments = _read(spec)
    shape = whole_list("the shape of the data", data_shape, shortest=1)
    whole(num_classes=num_classes)
    if ":" in name:
        return _own(name, arguments, {"shape": shape, "num_classes": num_classes})
    if name not in NETWORKS:
        raise EnfoldError(
            f"there is no network {name!r}{_nearest(name, NETWORKS)}: choose one of {', '.join(NETWORKS)}, "
            "wrn-28-10, or name your own as file.py:function"
        )
    network = NETWORKS[name]
    accepted = inspect.signature(network).parameters
    if accepted.keys() & {"shape", "in_channels"} and len(shape) != 3:
        raise EnfoldError(
            f"the network {name!r} needs images of the shape (channels, height, width), got data of shape "
            f"{shape}: reshape the data or choose 'mlp'"
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


def _read(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a spec; "wrn-28-10" is spelled out."""
    arguments = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise EnfoldError(f"a network must have a name, got {spec!r}: write for example {{'name': 'mlp'}}")
    if match := WIDE_RESNET.fullmatch(name):
        if twice := sorted(arguments.keys() & {"depth", "widen_factor"}):
            raise EnfoldError(
                f"{name!r} already says its {' and '.join(twice)}, got it twice: leave out one of the two"
            )
        return "wide-resnet", {"depth": int(match[1]), "widen_factor": int(match[2]), **arguments}
    return name, arguments


def _own(reference: str, arguments: dict[str, Any], known: dict[str, Any]) -> Callable[[], nn.Module]:
    """A factory that calls the user's function."""
    from enfold.io.usercode import resolve

    function = resolve(reference)
    if not callable(function) or isinstance(function, nn.Module):
        raise EnfoldError(
            f"{reference!r} must be a function or a class that makes a network, got "
            f"{type(function).__name__}: refer to a function that returns a new network each time"
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
            f"{reference!r} is called with `shape` and `num_classes` where it takes them, and there is "
            f"{error}: give the others defaults or write them beside the name"
        ) from error
    return partial(_made, reference, partial(function, **derived, **arguments))


def _made(reference: str, function: Callable[[], Any]) -> nn.Module:
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
                f"{argument} of the network {name!r} follows from the data, got it as an argument: omit it"
            )
        if argument not in accepted:
            choices = f"choose from {', '.join(accepted)}" if accepted else "it takes none"
            raise EnfoldError(
                f"the network {name!r} has no argument {argument!r}{_nearest(argument, accepted)}: {choices}"
            )


def _nearest(word: str, choices: Iterable[str]) -> str:
    near = closest(str(word), choices)
    return f" (did you mean {near!r}?)" if near else ""
