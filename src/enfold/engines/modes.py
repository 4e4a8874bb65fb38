"""Train and eval mode, restored for each module after a block; and torch's inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError


def refuse_inference_mode(what: str) -> None:
    """Raise EnfoldError in inference mode, in which networks cannot be made or trained."""
    if torch.is_inference_mode_enabled():
        raise EnfoldError(
            f"{what} needs gradients, got a call inside torch.inference_mode(): call it without inference mode"
        )


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor: this process has a part of it. The class takes long to import."""
    return hasattr(tensor, "full_tensor")


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters are divided among processes, as by `torch.distributed.fsdp.fully_shard`."""
    return any(map(is_shard, model.parameters()))


def without_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Return torch's inference mode, or `torch.no_grad` for sharded parameters, whose buffers training uses again."""
    return torch.no_grad() if is_sharded(model) else torch.inference_mode()


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore the mode of each submodule after it."""
    modes = [(inner, inner.training) for module in modules for inner in _all_modules(module)]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def ensure_eval_mode(module: nn.Module) -> AbstractContextManager[None]:
    """Set eval mode inside the block if it is not set, so that values cached for eval mode stay valid."""
    return eval_mode(module) if any(inner.training for inner in _all_modules(module)) else nullcontext()


def _all_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all submodules, and those of the networks in `Ensemble.codes`, which are not submodules."""
    for inner in module.modules():
        yield inner
        codes = getattr(inner, "codes", None)
        for code in codes if isinstance(codes, list) else ():
            yield from getattr(code, "network", nn.Module()).modules()
