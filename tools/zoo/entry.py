"""A network of the zoo: where it comes from, how a small one is made, and what it is given."""

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
class Foreign:
    """One network of the zoo."""

    name: str
    package: str  # as pip calls it; "by hand" for those that are written here
    make: Callable[[int], nn.Module]  # member k, small; the seed is set before the call
    inputs: Callable[[int], Tensor]  # so many examples
    classes: int = CLASSES


def foreign(
    package: str, module: str, name: str, inputs: Callable[[int], Tensor], *args: Any, label: str = "", **settings: Any
) -> Foreign:
    """A network that a class or function called `name` makes in a module of a package."""
    return Foreign(label or name, package, lambda _: getattr(import_module(module), name)(*args, **settings), inputs)


def images(size: int = 16, channels: int = 3) -> Callable[[int], Tensor]:
    """Images of this size."""
    return lambda count: torch.randn(count, channels, size, size)


def tokens(length: int = 8, highest: int = TOKENS) -> Callable[[int], Tensor]:
    """Sentences of this length."""
    return lambda count: torch.randint(1, highest, (count, length))


def vectors(*shape: int) -> Callable[[int], Tensor]:
    """Examples of this shape."""
    return lambda count: torch.randn(count, *shape)


class Called(nn.Module):
    """A network that takes more than one argument, or a dictionary: `call(body, inputs)` says how."""

    def __init__(self, body: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.call = body, call

    def forward(self, inputs: Tensor) -> Any:
        """Of the one input."""
        return self.call(self.body, inputs)


def seeded(seed: int) -> None:
    """All sources of random numbers that packages draw from."""
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
