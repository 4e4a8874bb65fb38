"""Output of commands about a run: its table, warnings, and the commands that continue it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.options import console, draw_figures, print_json, say

if TYPE_CHECKING:
    from enfold.run import Recipe, RunDirectory


def report(run: RunDirectory, summary: dict[str, Any], as_json: bool) -> None:
    """Write the table and the figure of a summary, and print it."""
    from enfold.io.files import write_text
    from enfold.report.figure import draw_quality_cost
    from enfold.report.table import legend, markdown_table, table_notes, terminal_table

    below = [*table_notes(summary), legend(summary)]
    write_text(run.path / "table.md", markdown_table(summary) + "".join(f"\n{line}.\n" for line in below))
    if any(row.get("cost") for row in summary["rows"].values()):
        draw_figures(lambda: draw_quality_cost(summary, run.path))
    _show_warnings(run, summary)
    if as_json:
        print_json(summary)
        return
    terminal = console()
    terminal.print(terminal_table(summary))
    for line in below:
        terminal.print(line, style="dim")
    files = ["table.md", "summary.json", *(name for name in ["quality-cost.svg"] if (run.path / name).is_file())]
    terminal.print(f"written to {run.path}: {', '.join(files)}, weights in members/, steps/ and controls/")


def show_theory(rows: dict[str, Any]) -> None:
    """Print the scores of the theory of averaging of all ensembles."""
    from rich.table import Table

    from enfold.report.theory import theory_table

    header, cells = theory_table(rows)
    table = Table(title="theory of averaging, test data", title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in cells:
        table.add_row(*row)
    console().print(table)


def show_members(recipe: Recipe, checkpoints: dict[str, Any]) -> None:
    """Print the file and validation scores of each member that came from a checkpoint."""
    from enfold.evaluate import shown
    from enfold.report.metric_columns import metric_title as title

    lines = [
        f"member {each['member']} is {each['file']}: validation "
        + ", ".join(f"{title(name)} {shown(name, each[name])}" for name in each if name not in ("member", "file"))
        for each in checkpoints.get("files", ())
    ]
    if lines:
        lines.append(
            "if a member scored higher where it was trained, its inputs had another form there: compare normalisation "
            "and the order of classes"
        )
    if checkpoints.get("left_out"):
        lines.append(f"the first {recipe.members} files are used, not {', '.join(checkpoints['left_out'])}")
    if recipe.members == 1:
        lines.append("there is one member: merging it returns that member")
    for line in lines:
        say(f"enfold: {line}", stderr=True)


def draw(path: Path) -> None:
    """Draw the figures of calibration, corruptions and OOD detection."""
    from enfold.report.uncertainty_blocks import FOLDER, draw_uncertainty
    from enfold.run.collect import collect

    if written := draw_figures(lambda: draw_uncertainty(collect(path), path / FOLDER)):
        say(f"{len(written) // 2} figures as .svg and .png written to {path / FOLDER}", stderr=True)


def _show_warnings(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Print warnings, the sizes of OOD sets, and what is not finished."""
    lines = [f"{label}: {row['warning']}" for label, row in summary["rows"].items() if row.get("warning")]
    for name, info in (summary["rows"].get("ensemble", {}).get("ood") or {}).items():
        lines.append(f"{name}: {info['examples']:,} out-of-distribution images; {info['adapted']}")
    for line in lines:
        say(f"enfold: {line}", stderr=True)
    show_unfinished(run)


def show_unfinished(run: RunDirectory) -> None:
    """Print a line about steps that are not done, with the commands that finish or drop them."""
    from enfold.run.execute import list_unfinished

    recipe = run.recipe()
    left = list_unfinished(run, recipe)
    own = [each.label for each in recipe.steps if each.label in left]
    finish = recipe.command("run", run.recipe_file, run.path, "--resume")
    drop = f", or drop with  {shlex.join(['enfold', 'drop', str(run.path), own[0]])}" if own else ""
    if left:
        say(f"enfold: not finished: {', '.join(left)}: finish with  {finish}{drop}", stderr=True)
