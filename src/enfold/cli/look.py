"""Verbs that look: at a run, at what there is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from enfold.cli.options import AsJson, console, print_json
from enfold.errors import EnfoldError


def claims(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with stored predictions.")],
    file: Annotated[Path, typer.Argument(help="A YAML file of published orderings; see recipes/*.claims.yaml.")],
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Also write the verdicts to this JSON file.")] = None,
) -> None:
    """Judge a paper's claims by a run: which orderings held, which did not, which are within noise."""
    from enfold.files import write_json
    from enfold.report.claims import claims_legend, claims_table
    from enfold.run import RunDirectory
    from enfold.run.claims import judge, read_claims

    if out is not None and (out.suffix != ".json" or out.is_dir()):
        raise EnfoldError(f"verdicts are written to a .json file, got '{out}': change its name")
    claimed, opened = read_claims(file), RunDirectory.open(run_directory)
    words = ["enfold", "claims", str(run_directory), str(file), *(["--out", str(out)] if out else [])]
    content = {"command": shlex.join(words), **judge(opened, opened.recipe(), claimed)}
    if out is not None:
        write_json(out, content)
    if as_json:
        print_json(content)
        return
    terminal = console()
    terminal.print(claims_table(content))
    terminal.print(claims_legend(content), style="dim")


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain; all are listed without.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every method with its idea in one line, or explain one and all its settings."""
    from enfold.cli.listing import method_row, method_rows, method_table, methods_table, paper_of

    if name is None:
        rows = method_rows()
        print_json(rows) if as_json else console().print(methods_table(rows))
        return
    row = method_row(name)
    if as_json:
        print_json(row)
        return
    print(f"{row['name']} ({row['room']}): {row['idea']}\n\n{paper_of(name)}\n")
    console().print(method_table(row))


def data(
    name: Annotated[str | None, typer.Argument(help="A name to fetch or check; all are listed without.")] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download it.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify its files.")] = False,
    as_json: AsJson = False,
) -> None:
    """List, fetch and check data sets."""
    from enfold.cli.listing import check_data, data_rows, data_table
    from enfold.data import fetch as fetch_data

    if (fetch or check) and name is None:
        raise EnfoldError(
            "fetching and checking need a data set's name, got none: for example enfold data mnist --fetch"
        )
    if fetch and name is not None:
        console(stderr=True).print(f"fetched to {fetch_data(name)}")
    if check and name is not None:
        check_data(name)
        console(stderr=True).print(f"the files of {name} are whole")
        if not any(row["name"] == name for row in data_rows()):
            return  # a path of the user's own
    rows = data_rows(name)
    print_json(rows) if as_json else console().print(data_table(rows))


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what a missing extra would give."""
    from enfold.cli.listing import doctor_rows, doctor_table

    rows = doctor_rows()
    print_json(rows) if as_json else console().print(doctor_table(rows))
