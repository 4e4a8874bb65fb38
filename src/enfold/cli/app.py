"""The command line: its verbs read options, call the rooms below and print; they contain no logic."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, cast

import click
import typer

from enfold.cli import look, make
from enfold.errors import EnfoldError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="enfold: the quality of an ensemble at the price of one network.\n\n"
    "Start with `enfold demo`, then `enfold run RECIPE OUT` with a recipe of your own.",
)

RESUMABLE = ("demo", "run", "reproduce", "train", "share", "fold", "evaluate", "alignment")
INTERRUPTED = 130  # the exit code of what was stopped by Ctrl-C


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"enfold {version('enfold')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which enfold this is.")
    ] = False,
) -> None:
    """enfold: the quality of an ensemble at the price of one network."""


VERBS = (
    make.demo,
    make.run,
    make.reproduce,
    make.train,
    make.share,
    make.fold,
    make.evaluate,
    make.drop,
    look.claims,
    look.report,
    look.card,
    look.watch,
    look.alignment,
    look.landscape,
    look.methods,
    look.data,
    look.doctor,
)
for _verb in VERBS:
    app.command()(_verb)


def main() -> None:
    """The entry point: an error of the user's is one line on stderr and exit code 2."""
    try:
        app()
    except EnfoldError as error:
        print(f"enfold: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and stopped.code != INTERRUPTED:
            raise
        print(f"enfold: {_stopped(sys.argv[1:])}", file=sys.stderr)  # typer itself leaves without a word
        raise SystemExit(INTERRUPTED) from None


def _out(words: list[str]) -> Path:
    """The run directory that a command line names, or leaves to its default."""
    command = cast("click.Group", typer.main.get_command(app)).commands[words[0]]
    return Path(command.make_context(words[0], words[1:], resilient_parsing=True).params["out"])


def _stopped(words: list[str]) -> str:
    """What Ctrl-C leaves, and how to go on from it."""
    if not words or words[0] not in RESUMABLE or "--dry-run" in words:
        return "stopped"
    makes = words[0] in ("demo", "run", "train")
    if makes and not (_out(words) / "run.json").is_file():
        return f"stopped before anything was written: start again with  {shlex.join(['enfold', *words])}"
    resume = ["--resume"] if (makes or words[0] == "reproduce") and "--resume" not in words else []
    kept = "models that were finished are kept, and of the one in training its last whole epoch"
    return f"stopped; {kept}: go on with  {shlex.join(['enfold', *words, *resume])}"
