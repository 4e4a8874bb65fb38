"""Verbs that look: at a run, at what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from enfold.cli.options import AsJson, Device, Run, Seed, Trust, console, drawn, numbers, print_json, say, words
from enfold.errors import EnfoldError


def alignment(
    run_directory: Run,
    members: Annotated[int, typer.Option(help="Align the first so many.")] = 2,
    temperature: Annotated[float, typer.Option(help="Of the soft permutations.")] = 1.0,
    epochs: Annotated[int | None, typer.Option(help="Of permAVG (20 published); members train by RUN's plan.")] = None,
    examples: Annotated[
        int | None, typer.Option(help="Learn from so many training examples; all if not given.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Some of rows, line, matrices, averages, sweep, planted, different.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Of the sweep.")] = "0.1,0.5,1,5,10",
    noises: Annotated[str, typer.Option(help="Of planted permutations, in deviations of weights.")] = "0,1,3,10,30",
    points: Annotated[int, typer.Option(help="On each line.")] = 21,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Of permAVG: --set matched=12")] = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="A folder for it; alignment in the seed's if not given.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Look at what alignment does to a run's members: weights, lines, soft permutations, averages, known pairs.

    Each seed's is kept with it. Parts that are finished are not computed again.
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.report.alignment import alignment_figures
    from enfold.report.alignment_table import alignment_tables
    from enfold.run.alignment import MATRICES, PARTS, Asked, chosen_fold, stored_matrices, study
    from enfold.run.analyses import home
    from enfold.run.execute import cell_of
    from enfold.run.lock import writing

    check_device(device)
    opened, recipe = open_trusted(run_directory, trust_code)
    parts = words(only) or PARTS
    asked = Asked(members, examples, points, numbers(temperatures), numbers(noises), parts)
    cell = cell_of(opened, recipe, seed, device)
    folder = home("alignment", cell, out)
    fold = chosen_fold(cell, temperature, epochs, overrides or ())
    with writing(opened.path if out is None else out):
        found = study(cell, folder, asked, fold)
        matrices = stored_matrices(folder)
        figures = drawn(lambda: alignment_figures(found, matrices, folder))
    if as_json:
        print_json({"run": str(opened.path), "seed": cell.seed, "parts": found, "figures": [str(f) for f in figures]})
        return
    terminal = console()
    for table in alignment_tables(found):
        terminal.print(table)
    files = {"a .json file a part": True, MATRICES: matrices, "figures as .svg and .png": figures}
    terminal.print(f"written to {folder}: {', '.join(name for name, there in files.items() if there)}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One run or several, side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; RUN/report.html, or report.html here for several runs.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: it opens from disk and loads nothing from anywhere."""
    from enfold.io.files import write_text
    from enfold.report.page import page
    from enfold.run.gather import gather

    file = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if file.suffix not in (".html", ".htm") or file.is_dir():
        raise EnfoldError(f"a report is written to an .html file, got '{file}': change its name")
    write_text(file, page([gather(run) for run in runs]))
    say(f"written to {file}")


def card(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="An evaluated run.")],
    label: Annotated[str | None, typer.Option(help="The fold to ship; the best by validation NLL if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="The Markdown file; RUN/MODEL_CARD.md if left out.")] = None,
) -> None:
    """Write a model card for the network to ship: what it is, how good, how dear, and what it is not for."""
    from enfold.io.files import write_text
    from enfold.report.card import model_card
    from enfold.run.gather import gather

    file = out or run_directory / "MODEL_CARD.md"
    if file.suffix != ".md" or file.is_dir():
        raise EnfoldError(f"a model card is written to an .md file, got '{file}': change its name")
    write_text(file, model_card(gather(run_directory, label=label)))
    say(f"written to {file}")


def watch(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run, also one that is under way.")],
    port: Annotated[int, typer.Option(help="On the loopback address; 0 takes a free one.")] = 0,
) -> None:
    """Serve the growing report of a run to this machine alone, and refresh it; Ctrl-C stops it."""
    from enfold.run.watch import serve

    serve(run_directory, port, lambda address: say(f"{address}  (Ctrl-C stops it)"))


def landscape(
    run_directory: Run,
    only: Annotated[
        str | None, typer.Option(help="Some parts: similarity,diversity,map,radial,three,sizes,outside,paths.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="A part that would take longer is left out, and named.")] = 10.0,
    seed: Seed = None,
    examples: Annotated[int, typer.Option(help="Networks are asked about so many test examples.")] = 500,
    size: Annotated[int, typer.Option(help="Points along each side of a plane.")] = 41,
    out: Annotated[Path | None, typer.Option(help="A folder for it; landscape in the seed's if not given.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Draw where a run's networks lie: how alike they are, paths and planes between them, what more of them give.

    Each seed's is kept with it. Parts that are finished are not computed again.
    """
    from enfold.cli.preflight import check_device, open_trusted
    from enfold.report.landscape import landscape_figures
    from enfold.report.landscape_words import landscape_table
    from enfold.run.analyses import home
    from enfold.run.execute import cell_of
    from enfold.run.landscape import Asked, stored_parts, study
    from enfold.run.lock import writing

    check_device(device)
    asked = Asked(words(only), minutes, examples, size)
    opened, recipe = open_trusted(run_directory, trust_code)
    cell = cell_of(opened, recipe, seed, device)
    folder = home("landscape", cell, out)
    with writing(opened.path if out is None else out):
        found = study(cell, folder, asked)
        figures = drawn(lambda: landscape_figures(stored_parts(folder), folder))
    if as_json:
        print_json({"run": str(opened.path), "seed": cell.seed, "parts": found, "figures": [str(f) for f in figures]})
        return
    terminal = console()
    terminal.print(landscape_table(found))
    terminal.print(f"written to {folder}: arrays as .safetensors, facts as .json, figures as .svg and .png")


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain; all are listed without.")] = None,
    as_json: AsJson = False,
) -> None:
    """List every method with its idea in one line, or explain one and all its settings."""
    from enfold.cli.listing import method_row, method_rows, method_table, methods_table, named, paper_of

    if name is None:
        rows = method_rows()
        print_json(rows) if as_json else console().print(methods_table(rows))
        return
    found = named(name)
    rows = [method_row(each) for each in found]
    if as_json:
        print_json(rows if len(rows) > 1 else rows[0])
        return
    for each, row in zip(found, rows, strict=True):
        use = f", which follows a fold: --set then=[{row['name']}]" if row["room"] == "step" else ""
        say(f"{row['name']} ({row['room']}{use}): {row['idea']}\n\n{paper_of(each)}\n")
        console().print(method_table(row))


def data(
    name: Annotated[str | None, typer.Argument(help="A name to fetch or check; all are listed without.")] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download it.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify its files.")] = False,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """List, fetch and check data sets."""
    from enfold.cli.listing import check_data, data_rows, data_table
    from enfold.data import fetch as fetch_data

    if (fetch or check) and name is None:
        raise EnfoldError(
            "fetching and checking need a data set's name, got none: for example enfold data mnist --fetch"
        )
    if fetch and name is not None:
        say(f"fetched to {fetch_data(name)}", stderr=True)
    if check and name is not None:
        check_data(name, trust_code)
        say(f"the files of {name} are whole", stderr=True)
        if not any(row["name"] == name for row in data_rows()):
            return  # a path of the user's own
    rows = data_rows(name)
    print_json(rows) if as_json else console().print(data_table(rows))


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what a missing extra would give."""
    from enfold.cli.listing import doctor_rows, doctor_table

    rows = doctor_rows()
    print_json(rows) if as_json else console().print(doctor_table(rows))
