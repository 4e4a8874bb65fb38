"""Train and eval mode, put back afterwards exactly as they were, module by module; and torch's inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from enfold.errors import EnfoldError


def refuse_inference_mode(what: str) -> None:
    """Networks that are made or trained in inference mode could never learn again."""
    if torch.is_inference_mode_enabled():
        raise EnfoldError(f"{what} needs gradients, got a call inside torch.inference_mode(): call it outside of it")


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Eval mode inside the block."""
    modes = [(part, part.training) for module in modules for part in _parts(module)]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def in_eval_mode(module: nn.Module) -> AbstractContextManager[None]:
    """Eval mode inside the block; where that is the mode already, nothing is done and nothing kept for it is lost."""
    return evaluating(module) if any(part.training for part in _parts(module)) else nullcontext()


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, and those of the networks that an Ensemble holds without listing them among its own."""
    for part in module.modules():
        yield part
        codes = getattr(part, "codes", None)
        for code in codes if isinstance(codes, list) else ():
            yield from getattr(code, "network", nn.Module()).modules()
