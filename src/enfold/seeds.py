"""Seeds: every random draw has its own, derived from the run's seed and its purpose.

Draws for member k depend on k and not on M, so M members are the first M of M + 1.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_seeding = threading.RLock()
DRAWING = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "bernoulli_",
    ]
)  # functions of torch that take a generator


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, for example ``derive(0, "order", member, epoch)``; stable across machines.

    >>> derive(0, "init", 1) == derive(0, "init", 1) != derive(0, "init", 2)
    True
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: torch takes int64


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose; draws on the CPU are the same for every device."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make what the block draws depend on the seed alone, not on what other threads draw at the same time.

    The global random state is the same after the block as before it.
    """
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(seed)
        with _OwnGenerator(seed):
            yield


class _OwnGenerator(TorchFunctionMode):
    """Draws on the CPU come from a generator of this thread's own; what takes none draws from the global state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.generator = torch.initial_seed(), torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls in place of `func`."""
        kwargs = kwargs or {}
        if _takes_generator(func) and kwargs.get("generator") is None and _device(args, kwargs).type == "cpu":
            if torch.initial_seed() != self.seed:  # the block has called torch.manual_seed
                self.seed = torch.initial_seed()
                self.generator.manual_seed(self.seed)
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def _takes_generator(function: Any) -> bool:
    if isinstance(function, FunctionType):  # of torch.nn.init
        code = function.__code__
        return "generator" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return getattr(function, "__name__", "") in DRAWING


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("tensor")
    device = given.device if isinstance(given, Tensor) else kwargs.get("device") or torch.get_default_device()
    return torch.device(device)
