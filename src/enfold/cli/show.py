"""What verbs show of a run: its table, what is to be told of it, and the commands that go on from there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.options import console, drawn, print_json, say

if TYPE_CHECKING:
    from enfold.run import Recipe, RunDirectory


def report(run: RunDirectory, summary: dict[str, Any], as_json: bool) -> None:
    """Write the table and the figure of a summary, and print it."""
    from enfold.io.files import write_text
    from enfold.report.figure import quality_cost
    from enfold.report.table import LEGEND, markdown_table, table_notes, terminal_table

    below = [*table_notes(summary), LEGEND]
    write_text(run.path / "table.md", markdown_table(summary) + "".join(f"\n{line}.\n" for line in below))
    if any(row.get("cost") for row in summary["rows"].values()):
        drawn(lambda: quality_cost(summary, run.path))
    _tell(run, summary)
    if as_json:
        print_json(summary)
        return
    terminal = console()
    terminal.print(terminal_table(summary))
    for line in below:
        terminal.print(line, style="dim")
    terminal.print(
        f"written to {run.path}: table.md, summary.json, quality-cost.svg, weights under members/, shares/ and folds/"
    )


def tell_members(recipe: Recipe, brought: dict[str, Any]) -> None:
    """Which file is which member, with how it does on validation data, and whether there is anything to merge."""
    lines = [
        f"member {each['member']} is {each['file']}: validation accuracy {100 * each['accuracy']:.2f} %, "
        f"NLL {each['nll']:.4f}"
        for each in brought.get("files", ())
    ]
    if lines:
        lines.append(
            "a member that was better where it was trained saw its inputs in another form there: normalisation, "
            "order of classes"
        )
    if brought.get("left_out"):
        lines.append(f"of more files the first {recipe.members} were taken, not {', '.join(brought['left_out'])}")
    if recipe.members == 1:
        lines.append("there is one member alone: a merge of it is that member")
    for line in lines:
        say(f"enfold: {line}", stderr=True)


def draw(path: Path) -> None:
    """The figures of what models say of their own certainty."""
    from enfold.report.uncertainty_blocks import FOLDER, uncertainty_figures
    from enfold.run.gather import gather

    if written := drawn(lambda: uncertainty_figures(gather(path), path / FOLDER)):
        say(f"{len(written) // 2} figures as .svg and .png written to {path / FOLDER}", stderr=True)


def _tell(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Warnings, what sets from outside are, and what the run lacks still."""
    lines = [f"{label}: {row['warning']}" for label, row in summary["rows"].items() if row.get("warning")]
    for name, told in (summary["rows"].get("ensemble", {}).get("ood") or {}).items():
        lines.append(f"{name}: {told['examples']:,} images from outside; {told['adapted']}")
    for line in (*lines, *_unfinished(run)):
        say(f"enfold: {line}", stderr=True)


def _unfinished(run: RunDirectory) -> list[str]:
    """One line about methods that were interrupted, if there are any: how to finish or drop them."""
    from enfold.run.execute import unfinished

    recipe = run.recipe()
    left = unfinished(run, recipe)
    own = [each.label for each in (*recipe.shares, *recipe.folds) if each.label in left]
    finish = recipe.command("run", run.recipe_file, run.path, "--resume")
    drop = f", or drop with  {shlex.join(['enfold', 'drop', str(run.path), own[0]])}" if own else ""
    return [f"not finished yet: {', '.join(left)}: finish with  {finish}{drop}"] if left else []
