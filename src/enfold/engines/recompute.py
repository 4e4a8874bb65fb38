"""Recomputation: a block that `torch.utils.checkpoint` runs again in the backward pass is given its values again.

A network without values holds those of one member for one call. A checkpointed block is run once more when that call
has long ended, and other members' have begun: so what was entered around it is noted in the forward, and entered again.
Torch offers no place to do this; the two functions of its own that are given the block are wrapped, once, and outside
of such calls do what they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from enfold.errors import EnfoldError

Enter = Callable[[], AbstractContextManager[object]]


class Entered(threading.local):
    """What is around the code that runs now."""

    def __init__(self) -> None:
        self.contexts: list[Enter | None] = []  # None: what is inside cannot be run again
        self.blocks = 0  # that are checkpointed


entered = Entered()


@contextmanager
def repeated(enter: Enter) -> Iterator[None]:
    """The context, which blocks that are checkpointed inside it are given again when they are run again."""
    with enter():
        entered.contexts.append(enter)
        try:
            yield
        finally:
            entered.contexts.pop()


def _again(block: Callable[..., Any]) -> Callable[..., Any]:
    """The block inside of what is around it now."""
    contexts = [enter for enter in entered.contexts if enter is not None]
    if len(contexts) < len(entered.contexts):
        raise EnfoldError(
            "a checkpointed block is run again in the backward pass, got one whose values are gone by then, as under "
            "vmap: use engine: loop"
        )

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for enter in contexts:
                stack.enter_context(enter())
            return block(*args, **kwargs)

    return again


def _counted(region: Iterator[None]) -> Iterator[None]:
    """The generator that torch advances before and after the block."""
    entered.blocks += 1
    try:
        yield from region
    finally:
        entered.blocks -= 1


def _wrap_torch() -> None:
    functions: Any = torch_checkpoint
    generate = getattr(functions, "_checkpoint_without_reentrant_generator", None)
    if generate is None:  # of another torch: a checkpointed block then fails in the backward pass, as it would without
        return
    apply = functions.CheckpointFunction.apply.__func__

    def generating(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        region: Iterator[None] = generate(_again(block) if entered.contexts else block, *args, **kwargs)
        return _counted(region)

    def applying(kind: Any, block: Callable[..., Any], *args: Any) -> Any:
        if not entered.contexts:
            return apply(kind, block, *args)
        ran = False

        def once(*inputs: Any) -> Any:
            nonlocal ran
            if ran:
                raise EnfoldError(
                    "blocks of members' networks are checkpointed without reentrance, got use_reentrant=True or none: "
                    "pass use_reentrant=False to checkpoint"
                )
            ran = True
            return block(*inputs)

        return apply(kind, once, *args)

    functions._checkpoint_without_reentrant_generator = generating
    functions.CheckpointFunction.apply = classmethod(applying)


_wrap_torch()
