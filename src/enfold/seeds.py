"""Seeds: every random draw has its own seed, derived from a base seed and its purpose.

Draws for member k depend on k and not on the number of members M, so that M members are the first M of M + 1.
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
    """Return a seed for one purpose, for example ``derive(0, "order", member, epoch)``; equal on all machines.

    Args:
        seed: The base seed.
        *purpose: Texts and numbers that identify the purpose.

    >>> derive(0, "init", 1) == derive(0, "init", 1) != derive(0, "init", 2)
    True
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: torch takes int64


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose, see `derive`; CPU draws do not depend on the training device.

    Args:
        seed: Seed of the run.
        purpose: Texts and numbers that name the purpose.
    """
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seed_scope(seed: int) -> Iterator[None]:
    """Make random draws inside the block depend on the seed only, also if other threads draw at the same time.

    The global random state is restored after the block.

    Args:
        seed: The seed.
    """
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(seed)
        with _OwnGenerator(seed):
            yield


class _OwnGenerator(TorchFunctionMode):
    """Use a separate generator for CPU draws of this thread; functions without a generator use the global state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.generator = torch.initial_seed(), torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with the generator if it accepts one."""
        kwargs = kwargs or {}
        if _takes_generator(func) and kwargs.get("generator") is None and _device(args, kwargs).type == "cpu":
            if torch.initial_seed() != self.seed:  # the block has called torch.manual_seed
                self.seed = torch.initial_seed()
                self.generator.manual_seed(self.seed)
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def _takes_generator(function: Any) -> bool:
    if isinstance(function, FunctionType):  # a function of torch.nn.init
        code = function.__code__
        return "generator" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return getattr(function, "__name__", "") in DRAWING


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("tensor")
    device = given.device if isinstance(given, Tensor) else kwargs.get("device") or torch.get_default_device()
    return torch.device(device)
