"""Commands that show: reports, analyses, methods, data sets and the installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from enfold.cli.options import (
    AsJson,
    Device,
    Run,
    Seed,
    Trust,
    console,
    draw_figures,
    parse_numbers,
    parse_words,
    print_json,
    say,
)
from enfold.errors import EnfoldError

analyse = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Analyse the networks of a run: the loss landscape, or the alignment of members.\n\n"
    "**Examples**\n\n    enfold analyse landscape runs/mine --minutes 5\n\n"
    "    enfold analyse alignment runs/mine --only rows,line",
)


@analyse.command()
def alignment(
    run_directory: Run,
    members: Annotated[int, typer.Option(help="Number of members to align, the first of the run.")] = 2,
    temperature: Annotated[float, typer.Option(help="Temperature of the soft permutations.")] = 1.0,
    epochs: Annotated[int | None, typer.Option(help="Epochs of permAVG; 20 as published.")] = None,
    examples: Annotated[int | None, typer.Option(help="Number of training examples; all by default.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Sections, of rows,line,matrices,averages,sweep,planted,different.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the sweep.")] = "0.1,0.5,1,5,10",
    noises: Annotated[
        str, typer.Option(help="Noise of planted permutations, in standard deviations of the weights.")
    ] = "0,1,3,10,30",
    points: Annotated[int, typer.Option(help="Points on each line.")] = 21,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="An option of permAVG: --set matched=12")] = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; alignment/ of the seed by default.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Show what alignment does to members: weights, interpolations, soft permutations and averages.

    Results are stored with the seed; finished sections are not computed again.

    **Examples**

        enfold analyse alignment runs/mine --only rows,line --epochs 5
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.report.alignment import draw_alignment
    from enfold.report.alignment_table import alignment_tables
    from enfold.run.alignment import MATRICES, PARTS, AlignmentOptions, permutation_options, stored_matrices, study
    from enfold.run.analyses import home
    from enfold.run.execute import find_seed
    from enfold.run.lock import writing

    check_device(device)
    opened, recipe = open_trusted(run_directory, trust_code)
    parts = parse_words(only) or PARTS
    options = AlignmentOptions(members, examples, points, parse_numbers(temperatures), parse_numbers(noises), parts)
    chosen = find_seed(opened, recipe, seed, device)
    folder = home("alignment", chosen, out)
    permutation = permutation_options(chosen, temperature, epochs, overrides or ())
    with writing(opened.path if out is None else out):
        found = study(chosen, folder, options, permutation)
        matrices = stored_matrices(folder)
        figures = draw_figures(lambda: draw_alignment(found, matrices, folder))
    if as_json:
        print_json({"run": str(opened.path), "seed": chosen.seed, "parts": found, "figures": [str(f) for f in figures]})
        return
    terminal = console()
    for table in alignment_tables(found):
        terminal.print(table)
    files = {"a .json file a part": True, MATRICES: matrices, "figures as .svg and .png": figures}
    terminal.print(f"written to {folder}: {', '.join(name for name, written in files.items() if written)}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One run, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; RUN/report.html, for several runs report.html, or RUN/MODEL_CARD.md.")
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="Write a model card in Markdown instead of the page.")] = False,
    label: Annotated[
        str | None, typer.Option(help="The step that the card is about; the best on validation data by default.")
    ] = None,
) -> None:
    """Write a self-contained HTML page about a run, or the model card of a network.

    The page loads nothing from the network.

    **Examples**

        enfold report runs/demo

        enfold report runs/a runs/b --out comparison.html

        enfold report runs/demo --card --label distill
    """
    from enfold.io.files import write_text
    from enfold.report.card import render_card
    from enfold.report.page import render_page
    from enfold.run.collect import collect

    if label is not None and not card:
        raise EnfoldError("--label chooses the network of a model card: add --card")
    if card:
        if len(runs) > 1:
            raise EnfoldError(f"a model card is about one run, got {len(runs)}: give one")
        file = out or runs[0] / "MODEL_CARD.md"
        _check_suffix(file, "a model card", (".md",))
        write_text(file, render_card(collect(runs[0], label=label)))
    else:
        file = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
        _check_suffix(file, "a report", (".html", ".htm"))
        write_text(file, render_page([collect(run) for run in runs]))
    say(f"written to {file}")


def _check_suffix(file: Path, what: str, suffixes: tuple[str, ...]) -> None:
    if file.suffix not in suffixes or file.is_dir():
        raise EnfoldError(f"{what} is written to a {suffixes[0]} file, got '{file}': change --out")


def watch(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run, also one in progress.")],
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0 takes a free one.")] = 0,
) -> None:
    """Serve the report of a run in progress on this machine, and refresh it; Ctrl-C stops it.

    **Examples**

        enfold watch runs/mine --port 8000
    """
    from enfold.run.watch import serve

    serve(run_directory, port, lambda address: say(f"{address}  (Ctrl-C stops it)"))


@analyse.command()
def landscape(
    run_directory: Run,
    only: Annotated[
        str | None, typer.Option(help="Sections, of similarity,diversity,map,radial,three,sizes,ood,paths.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Time limit; sections that would take longer are skipped and listed.")
    ] = 10.0,
    seed: Seed = None,
    examples: Annotated[int, typer.Option(help="Number of test examples.")] = 500,
    size: Annotated[int, typer.Option(help="Grid points along each side of a plane.")] = 41,
    out: Annotated[Path | None, typer.Option(help="Output folder; landscape/ of the seed by default.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Draw the loss landscape of a run: similarity, diversity, paths and planes between members, size curves.

    Results are stored with the seed; finished sections are not computed again.

    **Examples**

        enfold analyse landscape runs/mine --only similarity,diversity

        enfold analyse landscape runs/mine --minutes 30 --size 61
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.report.landscape import draw_landscape
    from enfold.report.landscape_captions import landscape_table
    from enfold.run.analyses import home
    from enfold.run.execute import find_seed
    from enfold.run.landscape import LandscapeOptions, stored_parts, study
    from enfold.run.lock import writing

    check_device(device)
    options = LandscapeOptions(parse_words(only), minutes, examples, size)
    opened, recipe = open_trusted(run_directory, trust_code)
    chosen = find_seed(opened, recipe, seed, device)
    folder = home("landscape", chosen, out)
    with writing(opened.path if out is None else out):
        found = study(chosen, folder, options)
        figures = draw_figures(lambda: draw_landscape(stored_parts(folder), folder))
    if as_json:
        print_json({"run": str(opened.path), "seed": chosen.seed, "parts": found, "figures": [str(f) for f in figures]})
        return
    terminal = console()
    terminal.print(landscape_table(found))
    terminal.print(f"written to {folder}: arrays as .safetensors, facts as .json, figures as .svg and .png")


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, or mine.py:name; all are listed without.")] = None,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """List all methods, or describe one with its options: types, defaults and meaning; `train` are training settings.

    **Examples**

        enfold methods

        enfold methods batch-ensemble

        enfold methods kd --json

        enfold methods mine.py:my_merge --trust-code

        enfold methods train
    """
    from enfold.cli.listings import (
        SETTINGS,
        find_methods,
        method_row,
        method_rows,
        method_table,
        methods_table,
        settings_row,
    )

    if name is None:
        rows = method_rows()
        print_json(rows) if as_json else console().print(methods_table(rows))
        return
    if name == SETTINGS:
        row = settings_row()
        if as_json:
            print_json(row)
        else:
            say(f"{row['idea']}\n")
            console().print(method_table(row))
        return
    found = find_methods(name, trust_code)
    rows = [method_row(each) for each in found]
    if as_json:
        print_json(rows if len(rows) > 1 else rows[0])
        return
    for each, row in zip(found, rows, strict=True):
        lines = [f"{row['name']} ({row['kind']}): {row['idea']}", each.reference, f"Use: {row['use']}\n"]
        say("\n\n".join(filter(None, lines)))
        console().print(method_table(row))


def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set to show, fetch or check; all are listed without.")
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download it.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify its files.")] = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """List, download and check data sets.

    **Examples**

        enfold data

        enfold data cifar10 --fetch

        enfold data my_images.npz --check
    """
    from enfold.cli.listings import check_data, data_rows, data_table
    from enfold.data import fetch as fetch_data

    if (fetch or check) and name is None:
        raise EnfoldError(
            "fetching and checking need a data set's name, got none: for example enfold data mnist --fetch"
        )
    if fetch and name is not None:
        say(f"fetched to {fetch_data(name)}", stderr=True)
    if check and name is not None:
        check_data(name, trust_code)
        say(f"the files of {name} are complete", stderr=True)
        if not any(row["name"] == name for row in data_rows()):
            return  # a path
    rows = data_rows(name)
    print_json(rows) if as_json else console().print(data_table(rows))


def doctor(as_json: AsJson = False) -> None:
    """Show the installed packages and how to install missing extras.

    **Examples**

        enfold doctor --json
    """
    from enfold.cli.listings import doctor_rows, doctor_table

    rows = doctor_rows()
    print_json(rows) if as_json else console().print(doctor_table(rows))
