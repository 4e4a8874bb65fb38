"""Engines for concurrent threads: one thread runs the engine itself, the others run copies of it.

An engine sets the values of a member in the modules of a network during a call, so concurrent calls must not use the
same modules. Copies are made when they are first needed and reused in later calls; they contain no values.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import fx

from enfold.engines.base import Engine
from enfold.engines.stacked import StackedProgram


def _has_graph_modules(engine: Engine) -> bool:
    skeleton = getattr(engine, "skeleton", None)
    return skeleton is not None and any(isinstance(module, fx.GraphModule) for module in skeleton.network.modules())


class EnginePool:
    """The copies of an ensemble's engines that no thread uses now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.idle: dict[int, list[Engine]] = {}  # by the id of the engine that they are copies of

    def clear(self) -> None:
        """Discard the copies, after a change of the engine; copies in use are not used again."""
        self.idle = {}

    @contextmanager
    def borrow(self, choose: Callable[[], Engine]) -> Iterator[Engine]:
        """Yield the engine that `choose` returns, or a copy of it while another thread runs it."""
        if self.lock.acquire(blocking=False):
            try:
                yield choose()
            finally:
                self.lock.release()
            return
        with self.lock:
            original = choose()
            if _has_graph_modules(original):  # copying would trace them again, so threads wait for each other
                yield original
                return
            copies = self.idle.setdefault(id(original), [])
            is_free = isinstance(original, StackedProgram)  # it sets no values in modules
            engine = original if is_free else copies.pop() if copies else copy.deepcopy(original)
        try:
            yield engine
        finally:
            if engine is not original:
                copies.append(engine)

    def __deepcopy__(self, memo: object) -> EnginePool:
        return EnginePool()

    def __reduce__(self) -> tuple[type[EnginePool], tuple[()]]:
        return EnginePool, ()
