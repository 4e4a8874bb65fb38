"""Compression: a search for the network to ship in place of an ensemble."""

import sys
import types
from typing import Any

from enfold.compress.call import compress
from enfold.compress.diagnosis import Diagnosis
from enfold.compress.result import Compression, Trial

__all__ = ["Compression", "Diagnosis", "Trial", "compress"]


class _Callable(types.ModuleType):
    """`enfold.compress(...)` is `enfold.compress.compress(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Compression:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
