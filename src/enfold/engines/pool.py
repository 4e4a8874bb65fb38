"""Engines for several threads at once: one runs the engine itself, the others run copies of it.

An engine puts a member's values into the modules of a network for the length of a call, so two calls at once must not
share these modules. Copies are made when they are first needed and kept for later calls; they hold no values.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import fx

from enfold.engines.base import Engine
from enfold.engines.program import StackedProgram


def _holds_graphs(engine: Engine) -> bool:
    skeleton = getattr(engine, "skeleton", None)
    return skeleton is not None and any(isinstance(part, fx.GraphModule) for part in skeleton.network.modules())


class EnginePool:
    """The copies of an ensemble's engines that no thread is using."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.idle: dict[int, list[Engine]] = {}  # by the id of the engine that they are copies of

    def clear(self) -> None:
        """Forget the copies, after a change of what they were made from; those in use are not used again."""
        self.idle = {}

    @contextmanager
    def borrow(self, choose: Callable[[], Engine]) -> Iterator[Engine]:
        """Give the engine that `choose` returns, or a copy of it while another thread has it."""
        if self.lock.acquire(blocking=False):
            try:
                yield choose()
            finally:
                self.lock.release()
            return
        with self.lock:
            original = choose()
            if _holds_graphs(original):  # a copy would trace them, which other threads notice: they take turns
                yield original
                return
            copies = self.idle.setdefault(id(original), [])
            is_free = isinstance(original, StackedProgram)  # it puts no values into modules
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
