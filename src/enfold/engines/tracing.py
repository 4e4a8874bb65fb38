"""Tracing of a forward pass by torch.fx, while other threads go on calling modules.

`fx.Tracer` replaces `nn.Module.__call__` and `nn.Module.__getattr__` for the length of a trace, for all threads of the
process. Here calls of other threads pass through it, and one thread traces at a time: two traces at once would leave
the replaced methods behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn

_tracing = threading.RLock()


def trace(network: nn.Module) -> fx.Graph:
    """Return the graph of a network's forward pass."""
    with _tracing:
        return _Tracer().trace(network)


class _Tracer(fx.Tracer):
    """A tracer that sees the modules of its own thread only."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called in place of every `nn.Module.__call__`."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Called in place of every `nn.Module.__getattr__`."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
