"""The sections of a page, built from stored results; sections without results are omitted."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.report.blocks import Block, Builder, Figure, Item, Listing, Notes, Section, Table, section_per_run
from enfold.report.content import Content, Difference
from enfold.report.curves import curve_blocks, duration, progress_blocks
from enfold.report.examples import example_blocks
from enfold.report.figure import draw, kind_of, read_points
from enfold.report.metric_columns import TITLES
from enfold.report.svg import draw_svg
from enfold.report.table import format_gain, row_title, table_rows
from enfold.report.theory import theory_blocks
from enfold.report.uncertainty_blocks import (
    FOLDER,
    calibration_blocks,
    corruption_blocks,
    coverage_blocks,
    ood_blocks,
)

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")
DIFFERENCES = {  # columns followed by the difference to the mean member: metric, scale, digits
    TITLES[name][0]: (name, *TITLES[name][1:]) for name in ("accuracy", "nll", "pinball", "mse")
}
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}


def format_difference(difference: Difference, scale: float, digits: int) -> tuple[str, str]:
    """Return a difference and its interval with signs."""
    low, high = (f"{scale * end:+.{digits}f}".replace("-", "−") for end in (difference.lower, difference.upper))
    return f"{scale * difference.mean:+.{digits}f}".replace("-", "−"), f"[{low}, {high}]"


def quality_cost_blocks(content: Content) -> list[Block]:
    """Return the figure of NLL against cost."""
    points = read_points(content.summary)
    if not points:
        return []
    best = min(points, key=lambda point: point.nll)
    several = len(content.summary["seeds"]) > 1
    return [
        Figure(
            title=f"{content.loss} against FLOPs",
            caption=(
                f"{content.loss} on test data (up is better) against the FLOPs of one prediction, as a ratio to a "
                f"single network. The best place is the upper left: the {content.loss} of the ensemble (dotted line) "
                "at the cost of a single network. A distilled network is better than more training only if it lies "
                "above its control, a member trained further for as many epochs."
                + (" Bars: standard deviation over seeds." if several else "")
            ),
            alt=(
                f"{content.loss} against cost of {len(points)} models; the lowest {content.loss} is {best.nll:.3f}"
                f"{' nats' if content.criterion == 'nll' else ''}, of {best.name} at "
                f"{best.cost:.3g} times the FLOPs of a single network"
            ),
            svg=draw_svg(lambda: draw(points), "the quality-cost figure"),
        )
    ]


def models(contents: Sequence[Content]) -> Section | None:
    """Return one table of all models of all runs."""
    known = [content for content in contents if content.rows]
    if not known:
        return None
    parts = [_columns(content) for content in known]
    names = list(dict.fromkeys(name for columns in parts for name in columns))
    several = len(known) > 1
    rows = []
    for content, columns in zip(known, parts, strict=True):
        for index, row in enumerate(content.rows):
            cells = [columns[name][index] if name in columns else Item("-") for name in names]
            run = [Item(content.name)] if several else []
            title = row_title(row, content.rows[row])
            rows.append((Item(title, mark=kind_of(row, content.rows[row])), *run, *cells))
    header = ("model", *(["run"] if several else []), *names)
    caption = (
        "Test data, ± standard deviation over seeds. Δ: difference to the mean member with its 95 % interval, from a "
        "paired bootstrap over seeds and test examples, in bold if the interval excludes 0. Latency: median of one "
        "call at batch size 1 and 128; in parentheses the ratio to a single network, or equal if the quartiles overlap."
    )
    intro = "All evaluated models. Click on a column to sort by it."
    return Section("models", "All models", intro, (("", (Table(caption, header, tuple(rows), sortable=True),)),))


def _columns(content: Content) -> dict[str, list[Item]]:
    """Return the columns of the table by name, without the column of models."""
    header, rows = table_rows(content.table)
    columns: dict[str, list[Item]] = {}
    for index, name in enumerate(header[1:], start=1):
        columns[name] = [_item(row[index]) for row in rows]
        if name in DIFFERENCES and content.differences:
            metric, scale, digits = DIFFERENCES[name]
            columns[f"Δ {name}"] = [_shift(content, row[0], metric, scale, digits) for row in rows]
    return columns


def _item(text: str) -> Item:
    """Return a cell; spreads and ratios in parentheses go to a second line, so that the table fits on the page."""
    if text == "-":
        return Item("–")
    found = NUMBER.search(text)
    shown, sign, aside = text.partition(" ± ") if " ± " in text else text.partition(" (")
    value = float(found[0].replace(",", "")) if found else None
    return Item(shown.replace("-", "−"), {" ± ": f"± {aside}", " (": f"({aside}"}.get(sign, ""), value)


def _shift(content: Content, row: str, metric: str, scale: float, digits: int) -> Item:
    difference = content.differences.get(row, {}).get(metric)
    if difference is None:
        return Item("–")
    shown, interval = format_difference(difference, scale, digits)
    return Item(shown, interval, scale * difference.mean, "beyond" if difference.beyond_noise else "")


def alignment_blocks(content: Content) -> list[Block]:
    """Return the figures of an alignment analysis."""
    return _blocks_in(content, [file for file in _listings(content) if file.parent.name == "alignment"])


def listed_blocks(content: Content) -> list[Block]:
    """Return all other figures listed in a figures.json of the run, except those that the page draws itself."""
    own = {"alignment", FOLDER}
    return _blocks_in(content, [file for file in _listings(content) if file.parent.name not in own])


def _listings(content: Content) -> list[Path]:
    return sorted(content.folder.rglob("figures.json"))


def _blocks_in(content: Content, listings: Iterable[Path]) -> list[Block]:
    """Return the listed figures of the first seed that has them, with a note where those of other seeds are."""
    seeds = {each.folder: each.seed for each in content.seeds if each.folder != content.folder}
    homes = [*seeds, content.folder]
    found: dict[Path, list[Path]] = {}  # path relative to a seed (or the run) -> the folders that have it
    for file in listings:
        home = next(home for home in homes if file.is_relative_to(home))
        found.setdefault(file.relative_to(home), []).append(home)
    blocks: list[Block] = []
    for name, held in found.items():
        first, *others = sorted(held, key=homes.index)
        if first in seeds:
            places = ", ".join(str((home / name).parent.relative_to(content.folder)) for home in others)
            note = f"other seeds: {places}" if others else "not available for other seeds"
            blocks.append(Notes(((f"seed {seeds[first]}", f"figures of one seed of {len(seeds)}; {note}"),)))
        blocks += _figures_in(content, first / name)
    return blocks


def _figures_in(content: Content, listing: Path) -> list[Figure]:
    try:
        entries = json.loads(listing.read_text(encoding="utf-8"))
        entries = entries["figures"] if isinstance(entries, dict) else entries
        return [_figure_entry(content.folder, listing, entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnfoldError(
            f"'{listing}' must list figures by file, title, caption and alt, but it cannot be read "
            f"({type(error).__name__}: {error}): draw them again"
        ) from error


def _figure_entry(run: Path, listing: Path, entry: Any) -> Figure:
    path = listing.parent / entry["file"]
    if not path.resolve().is_relative_to(run.resolve()) or not path.is_file():
        raise EnfoldError(f"'{listing}' must list files of its run, got '{entry['file']}': draw them again")
    words: dict[str, Any] = {name: str(entry[name]) for name in ("title", "caption", "alt")}
    if path.suffix == ".svg":
        return Figure(**words, svg=path.read_text(encoding="utf-8"), paper=True)
    if path.suffix not in PICTURES:
        raise EnfoldError(f"a figure must be SVG, PNG or JPEG, got '{path}' in '{listing}': draw it again")
    address = f"data:{PICTURES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Figure(**words, picture=address, paper=True)


def warning_blocks(content: Content) -> list[Block]:
    """Return the warnings of single models."""
    notes = tuple((name, str(row["warning"])) for name, row in content.rows.items() if row.get("warning"))
    return [Notes(notes)] if notes else []


def record_blocks(content: Content) -> list[Block]:
    """Return versions, seeds, times and the recipe of the run."""
    facts = [
        ("run", str(content.folder)),
        ("date", str(content.summary.get("date", "not finished"))),
        ("seeds", ", ".join(str(seed.seed) for seed in content.seeds)),
        *content.versions.items(),
    ]
    table = Table("Environment", ("field", "value"), tuple((Item(a), Item(b)) for a, b in facts))
    return [table, *_times(content), Listing("Recipe", content.recipe)]


def _times(content: Content) -> list[Block]:
    finished = [training for training in content.trainings if training.seconds is not None]
    stages = list(dict.fromkeys(training.stage for training in finished))
    rows = []
    for stage in stages:
        spent = {training.seed: training.seconds for training in finished if training.stage == stage}
        cells = [_seconds(spent.get(seed.seed)) for seed in content.seeds]
        rows.append((Item(stage), *cells))
    header = ("training", *(f"seed {seed.seed}" for seed in content.seeds))
    return [Table("Training time by seed", header, tuple(rows))] if rows else []


def _seconds(spent: float | None) -> Item:
    return Item("–") if spent is None else Item(duration(spent), value=spent)


SECTIONS: tuple[Builder, ...] = (
    section_per_run("quality-cost", "Quality and cost", "", quality_cost_blocks),
    models,
    section_per_run("progress", "In progress", "", progress_blocks),
    section_per_run("warnings", "Warnings", "Read these before you rely on the results.", warning_blocks),
    section_per_run(
        "calibration",
        "Calibration",
        "Accuracy in bins of confidence. Points on the dotted line are calibrated; below it a model is overconfident. "
        "The band is a 95 % bootstrap interval; the bars show the number of examples in each bin.",
        calibration_blocks,
    ),
    section_per_run("coverage", "Selective prediction", "", coverage_blocks),
    section_per_run("corruptions", "Corrupted inputs", "", corruption_blocks),
    section_per_run("ood", "OOD detection", "", ood_blocks),
    section_per_run("theory", "Theory of averaging", "", theory_blocks),
    section_per_run("curves", "Learning curves", "", curve_blocks),
    section_per_run(
        "examples",
        "Largest differences",
        "Test examples for which the predictions of the ensemble and of the selected network differ most.",
        example_blocks,
    ),
    section_per_run(
        "landscape",
        "Loss landscape",
        "Networks in weight space and in function space. Here a run is the training of one member, a mode its result.",
        listed_blocks,
    ),
    section_per_run(
        "alignment", "Alignment", "Members before and after their hidden units are matched.", alignment_blocks
    ),
    section_per_run("record", "Reproducibility", "", record_blocks),
)


def sections(contents: Sequence[Content], builders: Iterable[Builder] = SECTIONS) -> list[Section]:
    """Return the sections that have content, in order."""
    return [section for build in builders if (section := build(contents)) is not None]


def format_percent(value: float | None) -> str:
    """Return a fraction as an integer number of per cent."""
    return "–" if value is None else f"{100 * value:.0f} %".replace("-", "−")


def format_ratio(content: Content, row: str, what: str = "flops") -> str | None:
    """Return the cost of a row as a ratio to a single network."""
    cost = content.rows.get(row, {}).get("cost")
    return None if not cost else f"{cost['ratios'][what]:.2f}×"


def gain(content: Content, row: str) -> str:
    """Return the gain recovered of a row with its standard deviation over seeds, as `format_gain` writes it."""
    text = format_gain(content.table, row)
    return "–" if text == "-" else text.replace("-", "−").replace(" ", "\N{NO-BREAK SPACE}") if "%" in text else text
