"""What a network runs: recording it operation by operation, with the module that each one belongs to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Untraceable(Exception):
    """What the network does depends on values, or cannot be recorded."""


def float_outputs(output: Any) -> list[Tensor]:
    """All tensors of numbers in what a network returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    parts = parts or [value for value in getattr(output, "__dict__", {}).values() if isinstance(value, Tensor)]
    return [tensor for part in parts for tensor in float_outputs(part)]


@contextmanager
def decomposed() -> Iterator[None]:
    """Recurrent layers and attention as the operations that they are made of, not as one of a CPU's own."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # also setting the flags gives one
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def naming_modules(network: nn.Module, running: list[str]) -> Iterator[None]:
    """While a module runs, its name is the last of `running`."""

    def enter(name: str) -> Any:
        return lambda *_: running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in network.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield
