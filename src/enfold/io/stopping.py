"""Stop a training after its current batch.

A signal is a request; the training carries it out when its state can be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """A request to stop, for one training."""

    def __init__(self) -> None:
        self.is_requested = False


_listening: list[Stop] = []


@contextmanager
def stops_by_itself() -> Iterator[Stop]:
    """Yield what tells a training that it shall stop; it raises `KeyboardInterrupt` when it has saved its state.

    Raises:
        KeyboardInterrupt: At the end of the block, if the request was not carried out.
    """
    own = Stop()
    _listening.append(own)
    try:
        yield own
    finally:
        _listening.remove(own)
    if own.is_requested:
        raise KeyboardInterrupt


def request_stop() -> bool:
    """Ask the training in progress to stop; return False if there is none, or it was asked before."""
    if not _listening or _listening[-1].is_requested:
        return False
    _listening[-1].is_requested = True
    return True
