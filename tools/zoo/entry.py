"""Networks of the zoo: package, factory and inputs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor, nn

CLASSES = 5
TOKENS = 50


@dataclass(frozen=True)
class Entry:
    """One network of the zoo."""

    name: str
    package: str  # its name for pip; "by hand" for networks that are defined here
    make: Callable[[int], nn.Module]  # member k, small; the seed is set before the call
    inputs: Callable[[int], Tensor]  # returns this number of examples
    classes: int = CLASSES


def library(
    package: str, module: str, name: str, inputs: Callable[[int], Tensor], *args: Any, label: str = "", **settings: Any
) -> Entry:
    """Return the network that a class or function `name` of a module returns."""
    return Entry(label or name, package, lambda _: getattr(import_module(module), name)(*args, **settings), inputs)


def images(size: int = 16, channels: int = 3) -> Callable[[int], Tensor]:
    """Return a function that draws images of this size."""
    return lambda count: torch.randn(count, channels, size, size)


def tokens(length: int = 8, highest: int = TOKENS) -> Callable[[int], Tensor]:
    """Return a function that draws token sequences of this length."""
    return lambda count: torch.randint(1, highest, (count, length))


def vectors(*shape: int) -> Callable[[int], Tensor]:
    """Return a function that draws examples of this shape."""
    return lambda count: torch.randn(count, *shape)


class Called(nn.Module):
    """A network with several arguments or a dictionary: `call(body, inputs)` calls it."""

    def __init__(self, body: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.call = body, call

    def forward(self, inputs: Tensor) -> Any:
        """Return the outputs for a single input."""
        return self.call(self.body, inputs)


def seeded(seed: int) -> None:
    """Seed all generators that packages use."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def declare_operators() -> None:
    """Let a torchvision import whose binary is for another torch: its networks need none of its operators."""
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


KEPT: list[object] = []  # definitions end with the library that made them
