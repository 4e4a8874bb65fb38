"""Progress on stderr: a bar with the time left and the latest figures on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_title: ContextVar[str] = ContextVar("title", default="")  # of all that is shown inside a block
_part: ContextVar[str] = ContextVar("part", default="")


def printable(text: str) -> str:
    """A text with its control characters written out, as a terminal would obey them: escapes, carriage returns."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class ProgressBar(Protocol):
    """What long work tells about itself."""

    def advance(self, steps: float) -> None:
        """So many more steps are done."""

    def say(self, text: str) -> None:
        """The latest figures."""


class Silent:
    """Says nothing."""

    def advance(self, steps: float) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class Lines:
    """A line now and then, for logs: at most one in `interval` seconds, with the share done and the time left."""

    def __init__(self, title: str, total: float | None, done: float = 0.0, interval: float = 5.0) -> None:
        self.title, self.total, self.interval = title, total, interval
        self.before = self.done = done
        self.started = self.last = time.monotonic()

    def advance(self, steps: float) -> None:
        """Counted; shown with the next line."""
        self.done += steps

    def say(self, text: str) -> None:
        """A line, unless the last was printed a moment ago; the end is always printed."""
        now = time.monotonic()
        finished = self.total is not None and self.done >= self.total
        if now - self.last < self.interval and not finished:
            return
        self.last = now
        share = f" {100 * self.done / self.total:3.0f} %" if self.total else ""
        left = ""
        if self.total and self.before < self.done < self.total:
            pace = (now - self.started) / (self.done - self.before)
            left = f"  {pace * (self.total - self.done):.0f} s left"
        print(printable(f"{self.title}{share}  {text}{left}"), file=sys.stderr, flush=True)


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Inside the block, whatever is shown has this title: who asks for work knows its name better than who does it."""
    with _set(_title, title):
        yield


@contextmanager
def part(text: str) -> Iterator[None]:
    """Inside the block, every title is followed by this: which part it is of work that is shown several times."""
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
    """Show how far `title` has come; what was `done` before, in another run, does not count for the time left."""
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
