"""Progress: a bar with remaining time and latest values on a terminal or in a notebook, lines on stderr otherwise."""

from __future__ import annotations

import html
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Protocol

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
        print(self.line(text), file=sys.stderr, flush=True)

    def line(self, text: str) -> str:
        """Return the line: title, percentage, latest values and remaining time."""
        percent = f" {100 * self.done / self.total:3.0f} %" if self.total else ""
        left = ""
        if self.total and self.before < self.done < self.total:
            pace = (time.monotonic() - self.started) / (self.done - self.before)
            left = f"  {pace * (self.total - self.done):.0f} s left"
        return printable(f"{self.title}{percent}  {text}{left}")


class Cell:
    """A bar in the output of a notebook's cell, which is replaced at most ten times per second."""

    def __init__(self, title: str, total: float | None, done: float = 0.0, interval: float = 0.1) -> None:
        self.lines, self.text, self.interval = Lines(title, total, done), "", interval
        self.shown = time.monotonic()
        show: Any = import_module("IPython.display").display  # which a notebook has, so that it is no extra
        self.handle = show(self, display_id=True)

    def advance(self, steps: float) -> None:
        """Advance by a number of steps."""
        self.lines.advance(steps)
        self._show()

    def say(self, text: str) -> None:
        """Show the latest values."""
        self.text = text
        self._show()

    def close(self) -> None:
        """Show the last state."""
        self._show(final=True)

    def _show(self, *, final: bool = False) -> None:
        now = time.monotonic()
        if self.handle is not None and (final or now - self.shown >= self.interval):
            self.shown = now
            self.handle.update(self)

    def __repr__(self) -> str:
        return self.lines.line(self.text)

    def _repr_html_(self) -> str:
        total, done = self.lines.total, self.lines.done
        bar = f"<progress value='{done:g}' max='{total:g}'></progress> " if total else ""
        return f"<div style='font-family:monospace'>{bar}{html.escape(repr(self))}</div>"


def in_notebook() -> bool:
    """Return whether the code runs in the kernel of a notebook, whose stderr has a red background."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def announce(text: str) -> None:
    """Print a line that is not a result: to stderr, or in a notebook to stdout, where stderr is red."""
    print(printable(text), file=sys.stdout if in_notebook() else sys.stderr, flush=True)


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
    elif in_notebook():
        cell = Cell(title, total, done)
        try:
            yield cell
        finally:
            cell.close()
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
