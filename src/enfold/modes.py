"""Train and eval mode, put back afterwards exactly as they were, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Eval mode inside the block."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:  # Members pass their mode on to a network that modules() does not list
            module.train(module_mode(modes, module))
        for part, mode in modes:
            part.training = mode


def module_mode(modes: list[tuple[nn.Module, bool]], module: nn.Module) -> bool:
    """The recorded mode of one module."""
    return next(mode for part, mode in modes if part is module)
