"""The sections of a page, each from stored results alone and left out where there are none."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.report.blocks import Block, Builder, Figure, Item, Listing, Notes, Section, Table, of_each
from enfold.report.content import Content, Difference
from enfold.report.curves import curve_blocks, duration, progress_blocks
from enfold.report.doubt_blocks import FOLDER, calibration_blocks, corruption_blocks, coverage_blocks, outside_blocks
from enfold.report.examples import example_blocks
from enfold.report.figure import draw, kind_of, points_of
from enfold.report.svg import drawn
from enfold.report.table import marked, table_rows

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")
SHIFTS = {  # columns after which the difference to the mean member stands: metric, scale, digits
    "accuracy (%)": ("accuracy", 100.0, 2),
    "NLL (nats)": ("nll", 1.0, 4),
}
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}


def signed(difference: Difference, scale: float, digits: int) -> tuple[str, str]:
    """A difference and its interval as people read them."""
    low, high = (f"{scale * end:+.{digits}f}".replace("-", "−") for end in (difference.lower, difference.upper))
    return f"{scale * difference.mean:+.{digits}f}".replace("-", "−"), f"[{low}, {high}]"


def quality_cost_blocks(content: Content) -> list[Block]:
    """The plane of quality and cost."""
    points = points_of(content.summary)
    if not points:
        return []
    best = min(points, key=lambda point: point.nll)
    several = len(content.summary["seeds"]) > 1
    return [
        Figure(
            title="Quality and cost",
            caption=(
                "Each model's NLL on test data (up is better) against the operations of one prediction, as a ratio to "
                "one network. The place to be is the upper left: as good as the ensemble (upper dotted line) at the "
                "price of one network. A fold that trains counts only where it lies above its control, a member "
                "trained as long." + (" Bars: standard deviation over seeds." if several else "")
            ),
            alt=(
                f"NLL against cost of {len(points)} models; the lowest NLL is {best.nll:.3f} nats, of {best.name} at "
                f"{best.cost:.3g} times the operations of one network"
            ),
            svg=drawn(lambda: draw(points), "the quality-cost figure"),
        )
    ]


def models(contents: Sequence[Content]) -> Section | None:
    """One table of all models of all runs."""
    known = [content for content in contents if content.rows]
    if not known:
        return None
    parts = [_columns(content) for content in known]
    names = list(dict.fromkeys(name for columns in parts for name in columns))
    several = len(known) > 1
    rows = []
    for content, columns in zip(known, parts, strict=True):
        shares = {each["label"] for each in content.summary["recipe"].get("shares", ())}
        for index, row in enumerate(content.rows):
            cells = [columns[name][index] if name in columns else Item("-") for name in names]
            run = [Item(content.name)] if several else []
            name = marked(row, content.rows[row])
            rows.append((Item(name, mark=kind_of(row, shares)), *run, *cells))
    header = ("model", *(["run"] if several else []), *names)
    caption = (
        "Test data. After ±: the standard deviation over seeds. Δ: the difference to the mean member with its 95 % "
        "interval, by a paired bootstrap over seeds and test examples; in bold where the interval leaves out 0."
    )
    intro = "Every model that was evaluated. A click on a column's name sorts by it."
    return Section("models", "All models", intro, (("", (Table(caption, header, tuple(rows), sortable=True),)),))


def _columns(content: Content) -> dict[str, list[Item]]:
    """The columns of the table by name, without that of the names."""
    header, rows = table_rows(content.summary)
    columns: dict[str, list[Item]] = {}
    for index, name in enumerate(header[1:], start=1):
        columns[name] = [_item(row[index]) for row in rows]
        if name in SHIFTS and content.differences:
            metric, scale, digits = SHIFTS[name]
            columns[f"Δ {name}"] = [_shift(content, row[0], metric, scale, digits) for row in rows]
    return columns


def _item(text: str) -> Item:
    found = NUMBER.match(text)
    shown, _, aside = text.partition(" ± ")
    value = float(found[0].replace(",", "")) if found else None
    return Item(shown.replace("-", "−") if found else "–", f"± {aside}" if aside else "", value)


def _shift(content: Content, row: str, metric: str, scale: float, digits: int) -> Item:
    difference = content.differences.get(row, {}).get(metric)
    if difference is None:
        return Item("–")
    shown, interval = signed(difference, scale, digits)
    return Item(shown, interval, scale * difference.mean, "beyond" if difference.beyond_noise else "")


def alignment_blocks(content: Content) -> list[Block]:
    """The figures of `enfold alignment`."""
    return _blocks_in(content, [file for file in _listings(content) if file.parent.name == "alignment"])


def listed_blocks(content: Content) -> list[Block]:
    """Every other figure that a figures.json anywhere in the run names, but for those that a page draws itself."""
    drawn_here = {"alignment", FOLDER}
    return _blocks_in(content, [file for file in _listings(content) if file.parent.name not in drawn_here])


def _listings(content: Content) -> list[Path]:
    return sorted(content.folder.rglob("figures.json"))


def _blocks_in(content: Content, listings: Iterable[Path]) -> list[Block]:
    """The figures listed; where several seeds have the same listing, those of the first, and where the others are."""
    seeds = {each.folder: each.seed for each in content.seeds if each.folder != content.folder}
    homes = [*seeds, content.folder]
    found: dict[Path, list[Path]] = {}  # where in its seed's folder, or in the run's -> whose have it, in their order
    for file in listings:
        home = next(home for home in homes if file.is_relative_to(home))
        found.setdefault(file.relative_to(home), []).append(home)
    blocks: list[Block] = []
    for name, held in found.items():
        first, *others = sorted(held, key=homes.index)
        if first in seeds:
            places = ", ".join(str((home / name).parent.relative_to(content.folder)) for home in others)
            told = f"others are in {places}" if others else "no other has them yet"
            blocks.append(Notes(((f"seed {seeds[first]}", f"figures of one seed of {len(seeds)}; {told}"),)))
        blocks += _figures_in(content, first / name)
    return blocks


def _figures_in(content: Content, listing: Path) -> list[Figure]:
    try:
        entries = json.loads(listing.read_text(encoding="utf-8"))
        entries = entries["figures"] if isinstance(entries, dict) else entries
        return [_listed(content.folder, listing, entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnfoldError(
            f"'{listing}' must list figures by file, title, caption and alt, but it cannot be read "
            f"({type(error).__name__}: {error}): draw them again"
        ) from error


def _listed(run: Path, listing: Path, entry: Any) -> Figure:
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
    """What is to be told of single models."""
    notes = tuple((name, str(row["warning"])) for name, row in content.rows.items() if row.get("warning"))
    return [Notes(notes)] if notes else []


def record_blocks(content: Content) -> list[Block]:
    """How the run was made: versions, seeds, times, the recipe."""
    facts = [
        ("run", str(content.folder)),
        ("date", str(content.summary.get("date", "not finished"))),
        ("seeds", ", ".join(str(seed.seed) for seed in content.seeds)),
        *content.versions.items(),
    ]
    table = Table("What the results depend on", ("what", "value"), tuple((Item(a), Item(b)) for a, b in facts))
    return [table, *_times(content), Listing("The recipe", content.recipe)]


def _times(content: Content) -> list[Block]:
    finished = [training for training in content.trainings if training.seconds is not None]
    stages = list(dict.fromkeys(training.stage for training in finished))
    rows = []
    for stage in stages:
        spent = {training.seed: training.seconds for training in finished if training.stage == stage}
        cells = [_seconds(spent.get(seed.seed)) for seed in content.seeds]
        rows.append((Item(stage), *cells))
    header = ("training", *(f"seed {seed.seed}" for seed in content.seeds))
    return [Table("Time spent, by training and seed", header, tuple(rows))] if rows else []


def _seconds(spent: float | None) -> Item:
    return Item("–") if spent is None else Item(duration(spent), value=spent)


SECTIONS: tuple[Builder, ...] = (
    of_each("quality-cost", "Quality and cost", "", quality_cost_blocks),
    models,
    of_each("progress", "Not finished", "", progress_blocks),
    of_each("warnings", "Warnings", "What to know before trusting these figures.", warning_blocks),
    of_each(
        "calibration",
        "Calibration",
        "Does a confidence of 80 % mean that 80 % are right? Points on the dotted line do; below it a model is too "
        "sure. The band is what other test examples could have shown, the bars count examples.",
        calibration_blocks,
    ),
    of_each("coverage", "Knowing when to pass", "", coverage_blocks),
    of_each("corruptions", "Corrupted inputs", "", corruption_blocks),
    of_each("outside", "Inputs from outside", "", outside_blocks),
    of_each("curves", "Learning curves", "", curve_blocks),
    of_each(
        "examples",
        "Where they differ",
        "What is lost between the ensemble and one network shows best on single examples.",
        example_blocks,
    ),
    of_each(
        "landscape",
        "Landscape",
        "Where the networks lie, in weights and in what they say. A run is here one member's training, a mode its end.",
        listed_blocks,
    ),
    of_each("alignment", "Alignment", "What members become when their hidden units are paired.", alignment_blocks),
    of_each("record", "How it was made", "", record_blocks),
)


def sections(contents: Sequence[Content], builders: Iterable[Builder] = SECTIONS) -> list[Section]:
    """Those that have something to show, in their order."""
    return [section for build in builders if (section := build(contents)) is not None]


def percent(value: float | None) -> str:
    """A fraction as a whole number of per cent."""
    return "–" if value is None else f"{100 * value:.0f} %".replace("-", "−")


def ratio(content: Content, row: str, what: str = "flops") -> str | None:
    """What a row costs, as a ratio to one network."""
    cost = content.rows.get(row, {}).get("cost")
    return None if not cost else f"{cost['ratios'][what]:.2f}×"


def gain(content: Content, row: str) -> str:
    """How much of the ensemble's gain a row keeps, with its spread over seeds."""
    found = content.rows.get(row, {}).get("gain_recovered")
    if found is None:
        return "–"
    spread = "" if found["std"] is None else f" ± {100 * found['std']:.0f}"
    return f"{100 * found['mean']:.0f}{spread} %".replace("-", "−").replace(" ", "\N{NO-BREAK SPACE}")
