"""The command line: commands parse options, call the library and print results."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from enfold.cli import compress_command, export_command, run_commands, scale_commands, view_commands
from enfold.cli.help import command_with_methods
from enfold.cli.options import say
from enfold.errors import EnfoldError, UserCodeError, WriteError
from enfold.io.stopping import request_stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="enfold: one network with the quality of an ensemble.\n\n"
    "Start with `enfold demo`. Then run a recipe, `enfold run RECIPE OUT`, or work step by step: "
    "`enfold train RUN`, `enfold compress RUN`, `enfold distill RUN kd`, `enfold merge RUN weight-matching`, "
    "`enfold report RUN`. "
    "`enfold COMMAND --help` shows examples, `enfold methods NAME` the options of a method.",
)

RESUMABLE = ("demo", "run", "gather", "train", "distill", "merge", "compress", "evaluate", "analyse")
STOPPED = 128  # plus the number of the signal: the exit code of what was stopped by it
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
USUAL = (signal.SIG_DFL, signal.default_int_handler)
STOPPING = b"enfold: stopping after this batch; once more stops at once\n"
MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # in torch's words


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"enfold {version('enfold')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """enfold: one network with the quality of an ensemble."""


VERBS = (
    run_commands.demo,
    run_commands.run,
    scale_commands.gather,
    run_commands.train,
    run_commands.distill,
    run_commands.merge,
    compress_command.compress,
    run_commands.evaluate,
    run_commands.drop,
    export_command.export,
    view_commands.report,
    view_commands.watch,
    view_commands.methods,
    view_commands.data,
    view_commands.doctor,
)
METHODS_OF = {"train": "ensemble", "distill": "distill", "merge": "merge"}
for _verb in VERBS:
    _kind = METHODS_OF.get(_verb.__name__)
    app.command(cls=None if _kind is None else command_with_methods(_kind))(_verb)
app.add_typer(view_commands.analyse, name="analyse")


def main() -> None:
    """Run the command line; an error is one line on stderr, with exit code 2 for the input and 1 for what failed."""
    with _stopped_by_signals() as received:
        try:
            app()
        except EnfoldError as error:
            _leave(" ".join(str(error).split()), 1 if isinstance(error, WriteError | UserCodeError) else 2)
        except (KeyboardInterrupt, SystemExit) as stopped:
            done = not received or (
                received[-1] == signal.SIGINT and isinstance(stopped, SystemExit) and not stopped.code
            )
            if isinstance(stopped, SystemExit) and stopped.code != STOPPED + signal.SIGINT and done:  # as `watch` ends
                raise
            by = received[-1] if received else signal.SIGINT
            _leave(_describe_stop(sys.argv[1:]), STOPPED + by)  # typer prints nothing
        except (OSError, MemoryError, RuntimeError) as error:
            if not (fault := _fault(error)):
                raise
            _leave(" ".join(fault.split()), 1)


@contextmanager
def _stopped_by_signals() -> Iterator[list[int]]:
    """Let signals stop the process, a training after its current batch; yield the received signals."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not request_stop():
            raise KeyboardInterrupt
        with suppress(OSError):
            os.write(2, STOPPING)  # print is not allowed while a print is interrupted

    before = {number: signal.getsignal(number) for number in SIGNALS}
    open_to = [number for number, handler in before.items() if handler in USUAL]  # nohup has one ignored
    for number in open_to:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number in open_to:
            signal.signal(number, before[number])


def _leave(message: str, code: int) -> NoReturn:
    with suppress(OSError):  # of a terminal that is gone
        say(f"enfold: {message}", stderr=True)
    raise SystemExit(code) from None


def _fault(error: Exception) -> str:
    """Return the fault of the machine in one sentence; an empty string if the program itself failed."""
    if isinstance(error, OSError) and error.errno:
        where = f"'{error.filename}'" if error.filename else "a file"
        return f"{where} must be readable and writable, but the system says: {os.strerror(error.errno)}; check the path"
    if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY):
        return f"the work must fit into memory, but it does not ({error}): use smaller batches, fewer members or data"
    return ""


def _out(words: list[str]) -> Path:
    """Return the run directory of a command line."""
    return Path(_parameters(words)["out"])


def _parameters(words: list[str]) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    return dict(command.make_context(words[0], words[1:], resilient_parsing=True).params)


def _describe_stop(words: list[str]) -> str:
    """Return which results are stored after an interruption, and the command that continues."""
    if not words or words[0] not in RESUMABLE or "--dry-run" in words:
        return "stopped"
    makes = words[0] in ("demo", "run") or (words[0] == "train" and _parameters(words).get("method") is None)
    if makes and not (_out(words) / "run.json").is_file():
        return f"stopped before anything was written: start again with  {shlex.join(['enfold', *words])}"
    resume = ["--resume"] if makes and "--resume" not in words else []
    kept = "finished models and the last state of the model in training are stored"
    return f"stopped; {kept}: continue with  {shlex.join(['enfold', *words, *resume])}"
