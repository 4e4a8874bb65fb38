"""Run a network for tracing and verification: in float64, with fused operations decomposed and modules tracked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DOUBLE_TYPES = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
DOUBLE_TYPES |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)


class TraceError(Exception):
    """The operations of the network cannot be traced."""


class _Float64Mode(TorchDispatchMode):
    """Compute in float64 also where a network casts to a smaller type, so that rounding hides no difference."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with smaller floating-point types replaced by float64."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in DOUBLE_TYPES:
            kwargs["dtype"] = DOUBLE_TYPES[kwargs["dtype"]]
        given = list(_find_arguments((*args, *kwargs.values())))
        if not func._schema.is_mutable and any(one.dtype in DOUBLE_TYPES for one in given):
            args, kwargs = tree_map(_to_float64, (args, kwargs))
        result = func(*args, **kwargs)
        return result if given else _to_float64(result)


def _find_arguments(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in the arguments of an operation, which are values and lists of values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _find_arguments(value)


def _to_float64(value: Any) -> Any:
    return value.to(DOUBLE_TYPES[value.dtype]) if isinstance(value, Tensor) and value.dtype in DOUBLE_TYPES else value


def float64_mode() -> AbstractContextManager[object]:
    """Return a context in which all floating-point operations are computed in float64."""
    return _Float64Mode()  # type: ignore[no-untyped-call]


def float_outputs(output: Any) -> list[Tensor]:
    """Return all floating-point tensors in the output of a network."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    parts = parts or [value for value in getattr(output, "__dict__", {}).values() if isinstance(value, Tensor)]
    return [tensor for part in parts for tensor in float_outputs(part)]


@contextmanager
def decompose_fused_operations() -> Iterator[None]:
    """Run recurrent layers and attention as elementary operations inside the block."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # also setting the flags gives one
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def find_tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield all tensors in nested containers and objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and _holds(leaf):
            yield from find_tensors(list(vars(leaf).values()), depth - 1)


def has_other_values(value: Any) -> bool:
    """Return whether a value contains anything except tensors and None that a caller could branch on."""
    return any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(value))


def _holds(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type) and not callable(leaf)


Passed = Callable[[str, Any], None]  # a module's name and what goes in or out


@contextmanager
def track_modules(network: nn.Module, running: list[str], passed: Passed, left: Passed) -> Iterator[None]:
    """Keep the name of the running module last in `running`, and report inputs and outputs to it and to its caller.

    Args:
        network: The network.
        running: The names of the modules that are running, the innermost last.
        passed: Called with the name of a module or of its caller, and the inputs or outputs of the module.
        left: Called with the name and the outputs of a module when it returns.
    """

    def caller() -> str:
        return running[-1] if running else ""

    def enter(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            passed(caller(), (args, kwargs))
            running.append(name)
            passed(name, (args, kwargs))

        return hook

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        name = running.pop()
        passed(name, output)
        passed(caller(), output)
        left(name, output)

    with ExitStack() as stack:
        for name, module in network.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor | None:
    if num_classes < 1:
        return None  # their number depends on the values
    nowhere = torch.zeros((*input.shape, num_classes), dtype=input.dtype, device=input.device)
    return nowhere.scatter(-1, input.unsqueeze(-1), 1)


class ReadDetector(TorchFunctionMode):
    """Report when code reads a tensor's values as a list or an array.

    One-hot vectors are built without a check of the values, which would count as a read.
    """

    METHODS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and report reads."""
        if func in self.METHODS:
            self.read(args[0])
        if func is F.one_hot:
            made = _one_hot(*args, **(kwargs or {}))
            if made is not None:
                return made
        return func(*args, **(kwargs or {}))
