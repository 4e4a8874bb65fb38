"""Options of several commands, and functions that print and draw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from enfold.errors import EnfoldError, MissingExtra
from enfold.progress import printable

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a value of the recipe: --set train.epochs=5; `enfold methods train` lists the training settings.",
    ),
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", help="Seed to run; repeat for several seeds and standard deviations.")
]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1 or mps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Estimate time and memory without writing files.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="With --dry-run: estimate the run on devices that are not here, such as 8xA100, or 8xA100@0.3 if they "
        "reach 30 % of their peak.",
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor",
        help="Where members and steps are made: serial (one after the other), local (processes), ray, or auto. By "
        "default all members of a seed are trained together in this process.",
    ),
]
Workers = Annotated[int | None, typer.Option(help="Tasks at a time, of --executor; by default one for each CPU.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads of each worker; by default the CPUs divided by the workers.")
]
BlockSize = Annotated[int, typer.Option(help="Members that a task trains together, with --executor or --shard.")]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster, such as auto, with --executor ray.")]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="Make part i of n of the run, such as 1/8, in one of n processes on any machines; run all parts twice "
        "(members, then steps), then `enfold gather RUN`.",
    ),
]
PrintSbatch = Annotated[
    int | None, typer.Option(help="Print a script that submits this many shards to SLURM, and do nothing else.")
]
Trust = Annotated[bool, typer.Option("--trust-code", help="Allow Python code that is named as module:function.")]
Out = Annotated[Path, typer.Argument(help="Run directory.")]
Label = Annotated[str | None, typer.Option(help="Label of the row; by default the name of the method.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="An option of the method or a key of the step: --set temperature=4 --set train.epochs=5 --set first=2; "
        "`enfold methods METHOD` lists its options, `enfold methods train` the training settings.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the run; the first by default.")]
MethodName = Annotated[
    str, typer.Argument(help="A method, or mine.py:name with --trust-code; METHOD --help shows its options.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run with trained members.")]


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return numbers that are separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise EnfoldError(f"numbers must be separated by commas, got '{text}': write for example 0.1,1,10") from error


def parse_words(text: str | None) -> tuple[str, ...]:
    """Return words that are separated by commas; an empty tuple for None."""
    return tuple(part.strip() for part in text.split(",")) if text else ()


def draw_figures(figures: Callable[[], Iterable[Path]]) -> list[Path]:
    """Return the files of figures; if matplotlib is missing, print what to install and return none."""
    try:
        return list(figures())
    except MissingExtra as missing:
        say(str(missing), stderr=True)
        return []


def console() -> Any:
    """Return the console for tables: as wide as the terminal, or 160 columns; content is never read as markup."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    wide = None if sys.stdout.isatty() else 160
    return Plain(width=wide, highlight=False, markup=False, emoji=False)


def say(text: str, *, stderr: bool = False) -> None:
    """Print one line on stdout or stderr."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def print_json(content: Any) -> None:
    """Print JSON on stdout."""
    say(json.dumps(content, indent=2, ensure_ascii=False))
