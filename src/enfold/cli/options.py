"""Options that several verbs have, how they are read, and the ways to print and draw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from enfold.errors import EnfoldError, MissingExtra
from enfold.progress import printable

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe's value: --set plan.epochs=5")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Run this seed; several --seed give a spread.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run that is in OUT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, write nothing.")]
Trust = Annotated[
    bool, typer.Option("--trust-code", help="Run the Python code that is named (module:function); without it, none.")
]
Out = Annotated[Path, typer.Argument(help="The run directory.")]
Label = Annotated[str | None, typer.Option(help="The name of its row; the method's name if not given.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the method: --set rank=2 --set plan.epochs=5; of a fold also --set first=2, of the first "
        "members alone, and --set then=[repair], what follows.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of a run of several; the first if not given.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run with trained members.")]


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise EnfoldError(f"numbers are given with commas between them, got '{text}': for example 0.1,1,10") from error


def words(text: str | None) -> tuple[str, ...]:
    """Words with commas between them; none without a text."""
    return tuple(part.strip() for part in text.split(",")) if text else ()


def drawn(figures: Callable[[], Iterable[Path]]) -> list[Path]:
    """The files of figures; without the package that draws them, what to install is said, and there are none."""
    try:
        return list(figures())
    except MissingExtra as missing:
        say(str(missing), stderr=True)
        return []


def console() -> Any:
    """Where tables are printed: as wide as the terminal, or 160 columns. What they hold is text, never markup."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    wide = None if sys.stdout.isatty() else 160
    return Plain(width=wide, highlight=False, markup=False, emoji=False)


def say(text: str, *, stderr: bool = False) -> None:
    """One line on stdout or stderr."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def print_json(content: Any) -> None:
    """JSON on stdout."""
    say(json.dumps(content, indent=2, ensure_ascii=False))
