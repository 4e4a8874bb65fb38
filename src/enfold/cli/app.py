"""The verbs. They read options, call the rooms below and print; they contain no logic."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from enfold.errors import EnfoldError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="enfold: the quality of an ensemble at the price of one network.\n\n"
    "Start with `enfold demo`, then `enfold run RECIPE OUT` with a recipe of your own.",
)

INTERRUPTED = 130  # the exit code of what was stopped by Ctrl-C

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe's value: --set plan.epochs=5")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Run this seed; several --seed give a spread.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run that is in OUT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, write nothing.")]
Trust = Annotated[
    bool, typer.Option("--trust-code", help="Import the Python code that the recipe names (module:function).")
]
Out = Annotated[Path, typer.Argument(help="The run directory.")]


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


@app.command()
def demo(
    out: Annotated[Path, typer.Argument(help="The run directory.")] = Path("runs/demo"),
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train 4 members on data that ships with enfold, fold them, evaluate everything; three seeds, two minutes."""
    from importlib.resources import files

    from enfold.run import parse_recipe

    text = files("enfold.run").joinpath("demo.yaml").read_text(encoding="utf-8")
    changes = [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]
    _run(parse_recipe(text, "the demo", changes), out, device, resume=resume, as_json=as_json, dry_run=dry_run)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; see recipes/ for examples.")],
    out: Out,
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Run a whole recipe: train members, fold them, evaluate everything.

    Killed at any moment, it goes on from there with --resume.
    """
    from enfold.cli.preflight import require_trust
    from enfold.run import read_recipe

    changes = [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]
    loaded = read_recipe(recipe, changes)
    require_trust(loaded, trust_code, recipe)
    _run(loaded, out, device, resume=resume, as_json=as_json, dry_run=dry_run)


@app.command()
def train(
    out: Out,
    data: Annotated[str, typer.Option(help="A name (see `enfold data`), a path, or module:function.")] = "fashion-mini",
    network: Annotated[str, typer.Option(help="mlp, resnet20, ..., or file.py:function.")] = "mlp",
    members: Annotated[int, typer.Option(help="How many.")] = 4,
    overrides: Overrides = None,
    seeds: Seeds = None,
    device: Device = "cpu",
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train members into a new run directory; fold and evaluate them with the next verbs."""
    from enfold.run.recipe import apply_override, make_recipe

    content: dict[str, Any] = {"data": {"source": data}, "network": network, "members": members}
    for change in [*(overrides or ()), *([f"seeds={list(seeds)}"] if seeds else [])]:
        apply_override(content, change)
    recipe = make_recipe(content, "the command line")
    _run(recipe, out, device, resume=resume, as_json=as_json, dry_run=dry_run, train_only=True)


Label = Annotated[str | None, typer.Option(help="The name of its row; the method's name if not given.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the method: --set rank=2 --set plan.epochs=5")
]


@app.command()
def share(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with trained members.")],
    method: Annotated[str, typer.Argument(help="A share; `enfold methods` lists them.")],
    label: Label = None,
    overrides: Settings = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Train one more way to hold members in less space, or to draw them around one, beside a run's members.

    It has as many members as the run, but for methods with a number of their own (MIMO 3, snapshots 5, SWAG and
    subspaces 30, SWA 1): --set num_members=... changes it. `enfold methods NAME` explains the settings.
    """
    _add("share", run_directory, method, label, overrides, device, as_json=as_json, trust_code=trust_code)


@app.command()
def fold(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with trained members.")],
    method: Annotated[str, typer.Argument(help="A fold; `enfold methods` lists them.")],
    label: Label = None,
    overrides: Settings = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Fold a run's members into one network and evaluate it beside its control."""
    _add("fold", run_directory, method, label, overrides, device, as_json=as_json, trust_code=trust_code)


@app.command()
def evaluate(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with trained members.")],
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Evaluate every model of a run on test data; what is there already is not computed again."""
    from enfold.cli.preflight import check_device, require_trust
    from enfold.run import execute, open_run

    check_device(device)
    opened, recipe = open_run(run_directory)
    require_trust(recipe, trust_code, run_directory)
    _report(opened.path, execute(opened, recipe, device=device), as_json)


@app.command()
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
        _print_json(content)
        return
    console = _console()
    console.print(claims_table(content))
    console.print(claims_legend(content), style="dim")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain; all are listed without.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every method with its idea in one line, or explain one and all its settings."""
    from enfold.cli.listing import method_row, method_rows, method_table, methods_table, paper_of

    if name is None:
        rows = method_rows()
        _print_json(rows) if as_json else _console().print(methods_table(rows))
        return
    row = method_row(name)
    if as_json:
        _print_json(row)
        return
    print(f"{row['name']} ({row['room']}): {row['idea']}\n\n{paper_of(name)}\n")
    _console().print(method_table(row))


@app.command()
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
        _console(stderr=True).print(f"fetched to {fetch_data(name)}")
    if check and name is not None:
        check_data(name)
        _console(stderr=True).print(f"the files of {name} are whole")
        if not any(row["name"] == name for row in data_rows()):
            return  # a path of the user's own
    rows = data_rows(name)
    _print_json(rows) if as_json else _console().print(data_table(rows))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what a missing extra would give."""
    from enfold.cli.listing import doctor_rows, doctor_table

    rows = doctor_rows()
    _print_json(rows) if as_json else _console().print(doctor_table(rows))


def _add(
    room: str,
    run_directory: Path,
    method: str,
    label: str | None,
    overrides: list[str] | None,
    device: str,
    *,
    as_json: bool,
    trust_code: bool,
) -> None:
    from enfold.cli.preflight import check_device, require_trust
    from enfold.run import add_method, execute, open_run
    from enfold.run.recipe import apply_override

    opened, _ = open_run(run_directory)
    content: dict[str, Any] = {"method": method.replace("-", "_"), "label": label or method}
    for change in overrides or ():
        apply_override(content, change)
    check_device(device)
    require_trust(opened.recipe(), trust_code, run_directory)
    recipe = add_method(opened, room, content)
    _report(opened.path, execute(opened, recipe, device=device), as_json)


def _run(
    recipe: Any,
    out: Path,
    device: str,
    *,
    resume: bool,
    as_json: bool = False,
    dry_run: bool = False,
    train_only: bool = False,
) -> None:
    from enfold.cli.preflight import check_device
    from enfold.run import RunDirectory, execute
    from enfold.run.execute import cells

    check_device(device)
    if dry_run:
        from enfold.run.estimate import estimate

        found = estimate(recipe, device)
        _print_json(dataclasses.asdict(found)) if as_json else print(found)
        return
    cell = cells(RunDirectory(out), recipe, device)[0]
    cell.check()
    opened = RunDirectory.create(out, recipe, resume=resume)
    summary = execute(opened, opened.recipe(), device=device, train_only=train_only)
    if train_only and as_json:
        _print_json({"run": str(opened.path), "members": recipe.members, "seeds": list(recipe.seeds)})
    elif train_only:
        print(f"members in {opened.path}: go on with  enfold fold {opened.path} distill  or  enfold share ...")
    else:
        _report(opened.path, summary, as_json)


def _report(path: Path, summary: dict[str, Any], as_json: bool) -> None:
    from enfold.errors import MissingExtra
    from enfold.files import write_text
    from enfold.report.figure import quality_cost
    from enfold.report.table import LEGEND, markdown_table, terminal_table

    write_text(path / "table.md", markdown_table(summary) + f"\n{LEGEND}.\n")
    if any(row.get("cost") for row in summary["rows"].values()):
        try:
            quality_cost(summary, path)
        except MissingExtra as missing:
            print(missing, file=sys.stderr)
    for label, row in summary["rows"].items():
        if row.get("warning"):
            print(f"enfold: {label}: {row['warning']}", file=sys.stderr)
    if as_json:
        _print_json(summary)
        return
    console = _console()
    console.print(terminal_table(summary))
    console.print(LEGEND, style="dim")
    console.print(
        f"written to {path}: table.md, summary.json, quality-cost.svg, weights under members/, shares/ and folds/"
    )


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 160
    return Console(stderr=stderr, width=wide, highlight=False)


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


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


def _stopped(words: list[str]) -> str:
    """What Ctrl-C leaves, and how to go on from it."""
    if not words or words[0] not in ("demo", "run", "train", "share", "fold", "evaluate") or "--dry-run" in words:
        return "stopped"
    resume = ["--resume"] if words[0] in ("demo", "run", "train") and "--resume" not in words else []
    kept = "models that were finished are kept, and of the one in training its last whole epoch"
    return f"stopped; {kept}: go on with  {shlex.join(['enfold', *words, *resume])}"
