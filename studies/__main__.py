"""Run a study: python -m studies NAME --scale smoke|laptop|paper; without a name, list them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from enfold.cli.preflight import check_device
from enfold.errors import EnfoldError, WriteError
from enfold.io.files import write_json
from enfold.progress import printable
from enfold.run import RunDirectory
from studies.definition import SCALES, evaluate_existing, get_scale, list_studies, resolve_names
from studies.reproduce import Options, estimate_runs, reproduce, write_results
from studies.tables import claims_legend, claims_table, list_notes, listing_table, rows_table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description="Run published tables and figures and report for each claim whether it held, did not hold, or is "
        "within noise. Tables that use the same networks share runs in one --out folder.",
    )
    add = parser.add_argument
    add("name", nargs="?", help="a paper (all its tables), a table or figure; with --run also a YAML file of claims")
    add("--scale", default="laptop", help=f"{', '.join(SCALES)}: seconds, hours on a laptop, as published")
    add("--out", type=Path, help="the folder of the runs (default: runs/studies-SCALE); with --run a JSON file")
    add("--only", default="", help="names or patterns of runs: a,b,'cifar10-*'")
    add("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change every recipe")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    add("--resume", action="store_true", help="continue the runs in --out")
    add("--stored", action="store_true", help="evaluate the runs in --out as far as they are, train nothing")
    add("--dry-run", action="store_true", help="estimate time and memory, write nothing")
    add("--run", type=Path, metavar="RUN", help="evaluate the claims on this existing run; nothing is trained")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--trust-code", action="store_true", help="run the Python code that --set names (module:function)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one line on stderr."""
    given = make_parser().parse_args(arguments)
    try:
        _dispatch(given)
    except EnfoldError as error:
        print(printable(f"studies: {' '.join(str(error).split())}"), file=sys.stderr)
        return 1 if isinstance(error, WriteError) else 2
    except KeyboardInterrupt:
        words = list(arguments if arguments is not None else sys.argv[1:])
        command = shlex.join(["python", "-m", "studies", *words, *([] if given.resume else ["--resume"])])
        print(f"studies: stopped; finished models are stored: continue with  {command}", file=sys.stderr)
        return 130
    return 0


def _dispatch(given: argparse.Namespace) -> None:
    if given.name is None:
        rows = list_studies()
        _print_json(rows) if given.json else _console().print(listing_table(rows))
    elif given.run is not None:
        _evaluate_existing(given)
    else:
        check_device(given.device)
        names = resolve_names(given.name)
        for name in names:
            get_scale(name, given.scale)
        for name in names:
            only = tuple(word.strip() for word in given.only.split(",") if word.strip())
            changes = tuple(given.changes)
            resume = given.resume or given.stored
            options = Options(name, given.scale, changes, only, given.device, resume, given.trust_code, given.stored)
            _estimate(options, given.json) if given.dry_run else _reproduce(options, given)


def _reproduce(options: Options, given: argparse.Namespace) -> None:
    folder = given.out or Path("runs") / f"studies-{given.scale}"
    content = reproduce(options, folder)
    written = write_results(content, folder)
    if given.json:
        _print_json(content)
        return
    terminal = _console()
    terminal.print(rows_table(content))
    terminal.print(claims_table(content))
    for line in (claims_legend(content), *list_notes(content), f"written to {', '.join(map(str, written))}"):
        terminal.print(line, style="dim")


def _estimate(options: Options, as_json: bool) -> None:
    estimates = estimate_runs(options)
    if as_json:
        _print_json({run: dataclasses.asdict(each) for run, each in estimates.items()})
        return
    for run, each in estimates.items():
        print(f"{options.name}, {run}: {each}")


def _evaluate_existing(given: argparse.Namespace) -> None:
    if given.out is not None and (given.out.suffix != ".json" or given.out.is_dir()):
        raise EnfoldError(f"--out must be a .json file with --run, got '{given.out}': change its name")
    written = ["--out", str(given.out)] if given.out else []
    command = ["python", "-m", "studies", given.name, "--run", str(given.run), *written]
    content = {"command": shlex.join(command), **evaluate_existing(RunDirectory.open(given.run), given.name)}
    if given.out is not None:
        write_json(given.out, content)
    if given.json:
        _print_json(content)
        return
    terminal = _console()
    terminal.print(claims_table(content))
    terminal.print(claims_legend(content), style="dim")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
