"""Calibration, selective prediction, corruptions and OOD detection: blocks of a page, and figures as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from enfold.analysis.corruptions import summarize_by_kind
from enfold.data.corruptions.split import OURS
from enfold.errors import EnfoldError
from enfold.io.files import write_json
from enfold.report.blocks import Block, Figure, Item, Notes, Table
from enfold.report.content import ONE, Content, Uncertainty
from enfold.report.corruptions import COLOURS, PERCENT, TITLES, draw_boxes, draw_heat_map, select_models
from enfold.report.figure import kind_of, write_figure
from enfold.report.svg import draw_svg
from enfold.report.table import corrupted_name
from enfold.report.uncertainty import draw_curves, draw_histograms, draw_reliability, draw_roc

FOLDER = "figures"  # of a run, where the files are written
METRICS = ("accuracy", "nll", "ece")  # figures of corruptions that are written as files
TITLES_OF_SCORES = {
    "dempster_shafer": "Dempster–Shafer",
    "epkl": "expected pairwise divergence",
    "rmi": "reverse mutual information",
}


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn, with caption and alt text."""

    file: str
    title: str
    caption: str
    alt: str
    make: Callable[[], Any]
    purpose: str
    paper: bool = False
    small: bool = False

    def block(self) -> Figure:
        """Return the block for a page."""
        svg = draw_svg(self.make, self.purpose)
        return Figure(self.title, self.caption, self.alt, svg, paper=self.paper, small=self.small)


def draw_uncertainty(content: Content, folder: Path) -> list[Path]:
    """Write the figures of calibration, selective prediction, corruptions and OOD detection as SVG and PNG.

    Args:
        content: The results of a run.
        folder: Where the files are written; `figures.json` lists them with caption and alt text.

    Returns:
        The paths of the files.

    Raises:
        EnfoldError: If the run has no predictions.
    """
    drawings = [*_corruptions(content, METRICS, METRICS)]
    if content.uncertainty is not None:
        drawings += [
            each for draw in (_reliability, _coverage, _histograms, _roc) for each in draw(content.uncertainty)
        ]
    if not drawings:
        raise EnfoldError(
            f"figures need predictions, but the run in '{content.folder}' has none: run  "
            f"enfold evaluate {content.folder}{content.trust}"
        )
    written: list[Path] = []
    listed = []
    for each in drawings:
        written += write_figure(each.make, folder, each.file, each.purpose, each.alt)
        listed.append({"file": f"{each.file}.svg", "title": each.title, "caption": each.caption, "alt": each.alt})
    write_json(folder / "figures.json", {"figures": listed})
    return [*written, folder / "figures.json"]


def calibration_blocks(content: Content) -> list[Block]:
    """Return a reliability diagram per model."""
    return [each.block() for each in _reliability(content.uncertainty)] if content.uncertainty else []


def coverage_blocks(content: Content) -> list[Block]:
    """Return the figure of risk against coverage."""
    return [each.block() for each in _coverage(content.uncertainty)] if content.uncertainty else []


def corruption_blocks(content: Content) -> list[Block]:
    """Return the heat map of all models, and box plots of the main models by severity."""
    return [each.block() for each in _corruptions(content, ("accuracy",), ("accuracy", "nll"))]


def ood_blocks(content: Content) -> list[Block]:
    """Return a table of the AUROC of all models, a description of the OOD sets, and histograms of scores."""
    blocks: list[Block] = []
    rows = [(name, set_, ood) for name, row in content.rows.items() for set_, ood in (row.get("ood") or {}).items()]
    if rows:
        scores = list(dict.fromkeys(score for _, _, ood in rows for score in ood["scores"]))
        header = (
            "model",
            "set",
            *(f"AUROC by {TITLES_OF_SCORES.get(score, score.replace('_', ' '))} (%)" for score in scores),
        )
        items = tuple(
            (
                Item(name, mark=kind_of(name, content.rows[name])),
                Item(set_),
                *(_auroc(ood["scores"].get(score)) for score in scores),
            )
            for name, set_, ood in rows
        )
        caption = (
            "Probability that an OOD input has a higher uncertainty than a test input: 50 % is chance, 100 % perfect."
        )
        blocks.append(Table(caption, header, items, sortable=True))
        sets = {set_: ood for _, set_, ood in rows}
        notes = ((set_, f"{ood['examples']:,} images; {ood['adapted']}") for set_, ood in sets.items())
        blocks.append(Notes(tuple(notes)))
    return [*blocks, *(each.block() for each in (_histograms(content.uncertainty) if content.uncertainty else ()))]


def _reliability(found: Uncertainty) -> Iterator[Drawing]:
    for label, band in found.bands.items():
        gap = float((band.diagram.weights * band.diagram.gap).sum())
        word = "overconfident" if gap > 0 else "underconfident"
        count = int(band.diagram.counts.sum())
        yield Drawing(
            _file("reliability", label),
            title=label,
            caption=f"On average {100 * abs(gap):.1f} points {word}; seed {found.seed}, {count:,} examples.",
            alt=f"Reliability diagram of {label}: accuracy in bins of confidence with a 95 % band, counts below",
            make=partial(draw_reliability, {label: band}),
            purpose="reliability diagrams",
            small=True,
        )


def _coverage(found: Uncertainty) -> Iterator[Drawing]:
    curves = {label: (100 * each.coverage, 100 * each.risk) for label, each in found.coverage.items()}
    axes = "coverage (%)", "error on covered examples (%)"
    yield Drawing(
        "risk-coverage",
        title="Risk and coverage",
        caption=(
            "A model that abstains on its least confident predictions: error on the remaining examples (risk) against "
            f"their fraction (coverage). Lower is better. Seed {found.seed}."
        ),
        alt=f"Risk-coverage curves of {', '.join(curves)}",
        make=partial(draw_curves, curves, *axes),
        purpose="risk-coverage curves",
    )


def _corruptions(content: Content, by_kinds: Sequence[str], by_severity: Sequence[str]) -> Iterator[Drawing]:
    """Yield heat maps of the metrics `by_kinds` and box plots of the metrics `by_severity`."""
    seeds = [seed.corrupted["rows"] for seed in content.seeds if seed.corrupted is not None]
    known = select_models(seeds, None) if seeds else []
    if not known:
        return
    name = corrupted_name(content.rows)
    images = "test images" if name == OURS else f"the images of {name},"
    named = [ONE, "ensemble", *([content.headline.label, content.headline.control] if content.headline else [])]
    compared = [label for label in named if label in known][: len(COLOURS)] or known[:4]
    for metric in by_kinds:
        found = {label: summarize_by_kind([seed[label] for seed in seeds], metric) for label in known}
        yield Drawing(
            f"corruptions-{metric}",
            title="By kind of corruption",
            caption=(
                f"{_word(metric)} of every model (columns) on {images} under each kind of corruption (rows), mean over "
                "severities and seeds; darker is worse. Compare along a row: a network that is brighter than the mean "
                "member is more robust to that corruption."
            ),
            alt=f"Heat map of {_word(metric, capital=False)} for {len(next(iter(found.values())))} corruptions and "
            f"{len(known)} models",
            make=partial(draw_heat_map, found, metric, len(seeds)),
            purpose="the heat map" if metric == "accuracy" else f"the heat map of {metric}",
            paper=True,
        )
    for metric in by_severity:
        yield _severities(seeds, compared, metric)


def _severities(seeds: list[Any], labels: list[str], metric: str) -> Drawing:
    found = {label: summarize_by_kind([seed[label] for seed in seeds], metric) for label in labels}
    better, moves = ("Higher", "falls") if metric == "accuracy" else ("Lower", "rises")
    return Drawing(
        f"severities-{metric}",
        title=f"{TITLES[metric][0].upper()}{TITLES[metric][1:]} by severity",
        caption=(
            "Boxes: quartiles over kinds of corruption; whiskers: extremes; lines: medians. "
            f"{better} is better; a model that {moves} more slowly with severity is more robust."
        ),
        alt=f"Box plots of {TITLES[metric]} by severity of corruption, of {', '.join(labels)}",
        make=partial(draw_boxes, found, metric, len(seeds)),
        purpose=f"box plots of {metric}",
    )


def _histograms(found: Uncertainty) -> Iterator[Drawing]:
    for set_, shown in found.ood.items():
        yield Drawing(
            _file("ood", set_),
            title=f"Test images and {set_}",
            caption=(
                f"Distribution of the predictive {found.score} on test images (filled) and on {set_} (outlined). "
                "The less they overlap, the better the model detects OOD inputs."
            ),
            alt=f"Histograms of {found.score} on test images and on {set_}, of {', '.join(shown)}",
            make=partial(draw_histograms, shown, found.score),
            purpose=f"histograms of {set_}",
        )


def _roc(found: Uncertainty) -> Iterator[Drawing]:
    for set_, curves in found.roc.items():
        yield Drawing(
            _file("roc", set_),
            title=f"Detecting {set_}",
            caption=(
                f"True positive rate (images of {set_}) against false positive rate (test images) for all "
                f"thresholds of the {found.score}. The dotted line is chance. Seed {found.seed}."
            ),
            alt=f"ROC curves by {found.score} for {set_} against test images, of {', '.join(curves)}",
            make=partial(draw_roc, curves),
            purpose=f"ROC curves of {set_}",
        )


def _word(metric: str, *, capital: bool = True) -> str:
    word = TITLES[metric].removesuffix(" (%)") if metric in PERCENT else TITLES[metric]
    return word[0].upper() + word[1:] if capital else word


def _file(kind: str, name: str) -> str:
    """Return a file name for any label or path."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'set'}"


def _auroc(found: Any) -> Item:
    value = (found or {}).get("auroc")
    if not value:
        return Item("–")
    spread = "" if value["std"] is None else f"± {100 * value['std']:.1f}"
    return Item(f"{100 * value['mean']:.1f}", spread, 100 * value["mean"])
