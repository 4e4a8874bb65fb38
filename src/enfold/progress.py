"""Progress on stderr: a bar with the remaining time and the latest values on a terminal, plain lines otherwise."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_title: ContextVar[str] = ContextVar("title", default="")  # replaces the titles inside a block
_part: ContextVar[str] = ContextVar("part", default="")


def printable(text: str) -> str:
    """Return a text with control characters escaped, which a terminal would execute."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class ProgressBar(Protocol):
    """The interface of progress bars."""

    def advance(self, steps: float) -> None:
        """Advance by a number of steps."""

    def say(self, text: str) -> None:
        """Show the latest values."""


class Silent:
    """A progress bar that shows nothing."""

    def advance(self, steps: float) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


class Lines:
    """Progress as lines of text, for logs: at most one per `interval` seconds, with percentage and remaining time."""

    def __init__(self, title: str, total: float | None, done: float = 0.0, interval: float = 5.0) -> None:
        self.title, self.total, self.interval = title, total, interval
        self.before = self.done = done
        self.started = self.last = time.monotonic()

    def advance(self, steps: float) -> None:
        """Advance by a number of steps; they are shown with the next line."""
        self.done += steps

    def say(self, text: str) -> None:
        """Print a line, unless the previous one is more recent than `interval`; the last one is always printed."""
        now = time.monotonic()
        finished = self.total is not None and self.done >= self.total
        if now - self.last < self.interval and not finished:
            return
        self.last = now
        percent = f" {100 * self.done / self.total:3.0f} %" if self.total else ""
        left = ""
        if self.total and self.before < self.done < self.total:
            pace = (now - self.started) / (self.done - self.before)
            left = f"  {pace * (self.total - self.done):.0f} s left"
        print(printable(f"{self.title}{percent}  {text}{left}"), file=sys.stderr, flush=True)


@contextmanager
def replace_titles(title: str) -> Iterator[None]:
    """Replace the titles of all progress bars inside the block: the caller knows a better name."""
    with _set(_title, title):
        yield


@contextmanager
def part(text: str) -> Iterator[None]:
    """Append a text to the titles of all progress bars inside the block, such as "member 2"."""
    with _set(_part, text):
        yield


@contextmanager
def _set(variable: ContextVar[str], value: str) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


@contextmanager
def progress(
    title: str, total: float | None = None, *, done: float = 0.0, quiet: bool = False
) -> Iterator[ProgressBar]:
    """Show a progress bar during the block.

    Args:
        title: Title of the bar.
        total: Number of steps; None if unknown.
        done: Steps done in a previous run; they are ignored for the remaining time.
        quiet: Show nothing.

    Yields:
        The progress bar.
    """
    title = ", ".join(filter(None, (_title.get() or title, _part.get())))
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines(title, total, done)
    else:
        with _rich_bar(title, total, done) as bar:
            yield bar


@contextmanager
def _rich_bar(title: str, total: float | None, done: float) -> Iterator[ProgressBar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(printable(title), total=total, figures="")
        shown.update(task, completed=done)

        class Bar:
            def advance(self, steps: float) -> None:
                shown.advance(task, steps)

            def say(self, text: str) -> None:
                shown.update(task, figures=printable(text))

        yield Bar()
