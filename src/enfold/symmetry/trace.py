"""What a network runs: recording it operation by operation, with the module that each one belongs to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUGH = (torch.float32, torch.float16, torch.bfloat16)


class Untraceable(Exception):
    """What the network does cannot be recorded."""


class _InDouble(TorchDispatchMode):
    """Float64 also where a network asks for less, as norms and rotary positions do: else rounding hides a proof."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be skipped by a compiler takes importing it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with any smaller type replaced; numbers that it makes of nothing are float64, too."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in ROUGH:
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        made = isinstance(result, Tensor) and not any(isinstance(one, Tensor) for one in tree_leaves((args, kwargs)))
        return result.double() if made and result.dtype in ROUGH else result


def in_double() -> AbstractContextManager[object]:
    """Float64 in every operation of a network whose weights and inputs are."""
    return _InDouble()  # type: ignore[no-untyped-call]


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
def naming_modules(network: nn.Module, running: list[str], passed: Callable[[Any], None]) -> Iterator[None]:
    """While a module runs, its name is the last of `running`; it and its caller are `passed` what goes in and out."""

    def enter(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            passed((args, kwargs))
            running.append(name)
            passed((args, kwargs))

        return hook

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        passed(output)
        running.pop()
        passed(output)

    with ExitStack() as stack:
        for name, module in network.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield
