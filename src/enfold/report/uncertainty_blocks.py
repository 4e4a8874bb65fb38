"""Doubt and shift in a page and as files: calibration, unsure answers left out, corrupted and foreign inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from enfold.analysis.corruptions import by_kind
from enfold.data.corruptions.split import OURS
from enfold.errors import EnfoldError
from enfold.io.files import write_json
from enfold.report.blocks import Block, Figure, Item, Notes, Table
from enfold.report.content import ONE, Content, Doubt
from enfold.report.corruptions import COLOURS, PERCENT, TITLES, chosen_models, draw_boxes, draw_heat_map
from enfold.report.figure import kind_of, write_figure
from enfold.report.svg import drawn
from enfold.report.table import corrupted_name
from enfold.report.uncertainty import draw_curves, draw_histograms, draw_reliability, draw_roc

FOLDER = "figures"  # of a run, for these figures as files
METRICS = ("accuracy", "nll", "ece")  # under corruptions, of which there are files
WORDS = {  # of scores whose names are not words
    "dempster_shafer": "Dempster–Shafer",
    "epkl": "expected pairwise divergence",
    "rmi": "reverse mutual information",
}


@dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet, and how to read it."""

    file: str
    title: str
    caption: str
    alt: str
    make: Callable[[], Any]
    purpose: str
    paper: bool = False
    small: bool = False

    def block(self) -> Figure:
        """For a page."""
        svg = drawn(self.make, self.purpose)
        return Figure(self.title, self.caption, self.alt, svg, paper=self.paper, small=self.small)


def doubt_figures(content: Content, folder: Path) -> list[Path]:
    """Every figure of a run's doubt and shift as SVG and PNG, listed with caption and alt text in figures.json."""
    drawings = [*_corruptions(content, METRICS, METRICS)]
    if content.doubt is not None:
        drawings += [each for draw in (_reliability, _coverage, _histograms, _roc) for each in draw(content.doubt)]
    if not drawings:
        raise EnfoldError(
            f"figures are drawn of what was evaluated, got a run without predictions in '{content.folder}': run  "
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
    """A reliability diagram a model."""
    return [each.block() for each in _reliability(content.doubt)] if content.doubt else []


def coverage_blocks(content: Content) -> list[Block]:
    """Risk against coverage."""
    return [each.block() for each in _coverage(content.doubt)] if content.doubt else []


def corruption_blocks(content: Content) -> list[Block]:
    """All models by kind, and those that a reader compares by severity."""
    return [each.block() for each in _corruptions(content, ("accuracy",), ("accuracy", "nll"))]


def outside_blocks(content: Content) -> list[Block]:
    """How well foreign images are told from test images: a table of all models, how sets were made, histograms."""
    blocks: list[Block] = []
    rows = [(name, set_, told) for name, row in content.rows.items() for set_, told in (row.get("ood") or {}).items()]
    if rows:
        scores = list(dict.fromkeys(score for _, _, told in rows for score in told["scores"]))
        header = ("model", "set", *(f"AUROC by {WORDS.get(score, score.replace('_', ' '))} (%)" for score in scores))
        shares = {each["label"] for each in content.summary["recipe"].get("shares", ())}
        items = tuple(
            (
                Item(name, mark=kind_of(name, shares)),
                Item(set_),
                *(_auroc(told["scores"].get(score)) for score in scores),
            )
            for name, set_, told in rows
        )
        caption = "How often an image from outside is less certain than a test image: 50 % is chance, 100 % is perfect."
        blocks.append(Table(caption, header, items, sortable=True))
        sets = {set_: told for _, set_, told in rows}
        notes = ((set_, f"{told['examples']:,} images; {told['adapted']}") for set_, told in sets.items())
        blocks.append(Notes(tuple(notes)))
    return [*blocks, *(each.block() for each in (_histograms(content.doubt) if content.doubt else ()))]


def _reliability(found: Doubt) -> Iterator[Drawing]:
    for label, band in found.bands.items():
        gap = float((band.diagram.weights * band.diagram.gap).sum())
        word = "too sure" if gap > 0 else "not sure enough"
        count = int(band.diagram.counts.sum())
        yield Drawing(
            _file("reliability", label),
            title=label,
            caption=f"{100 * abs(gap):.1f} points {word} on the whole; seed {found.seed}, {count:,} examples.",
            alt=f"Reliability diagram of {label}: accuracy in bins of confidence with a 95 % band, counts below",
            make=partial(draw_reliability, {label: band}),
            purpose="reliability diagrams",
            small=True,
        )


def _coverage(found: Doubt) -> Iterator[Drawing]:
    curves = {label: (100 * each.coverage, 100 * each.risk) for label, each in found.coverage.items()}
    axes = "coverage: examples kept, most certain first (%)", "error among those kept (%)"
    yield Drawing(
        "risk-coverage",
        title="Risk and coverage",
        caption=(
            "Keep the answers that a model is surest of, leave the rest to someone else: the error among those "
            "kept (up) for each share kept (right). Lower is better; a curve that rises steadily means that "
            f"confidence tells right from wrong. Seed {found.seed}."
        ),
        alt=f"Error among the most certain test examples against the share kept, of {', '.join(curves)}",
        make=partial(draw_curves, curves, *axes),
        purpose="risk-coverage curves",
    )


def _corruptions(content: Content, by_kinds: Sequence[str], by_severity: Sequence[str]) -> Iterator[Drawing]:
    """Heat maps of some metrics and box plots of some."""
    seeds = [seed.corrupted["rows"] for seed in content.seeds if seed.corrupted is not None]
    known = chosen_models(seeds, None) if seeds else []
    if not known:
        return
    name = corrupted_name(content.rows)
    whose = "test images" if name == OURS else f"the images of {name},"
    named = [ONE, "ensemble", *([content.headline.label, content.headline.control] if content.headline else [])]
    compared = [label for label in named if label in known][: len(COLOURS)] or known[:4]
    for metric in by_kinds:
        found = {label: by_kind([seed[label] for seed in seeds], metric) for label in known}
        yield Drawing(
            f"corruptions-{metric}",
            title="By kind of corruption",
            caption=(
                f"{_word(metric)} of every model (a column) on {whose} corrupted in every way (a row), mean over "
                "severities and seeds; darker is worse. Read along a row: a fold that is brighter than the mean member "
                "withstands that corruption better."
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
    found = {label: by_kind([seed[label] for seed in seeds], metric) for label in labels}
    better, moves = ("Higher", "falls") if metric == "accuracy" else ("Lower", "rises")
    return Drawing(
        f"severities-{metric}",
        title=f"{TITLES[metric][0].upper()}{TITLES[metric][1:]} by severity",
        caption=(
            "A box spans the quartiles over kinds of corruption, its whiskers the extremes, the line in it the median. "
            f"{better} is better; what {moves} slower to the right is the more robust."
        ),
        alt=f"Box plots of {TITLES[metric]} by severity of corruption, of {', '.join(labels)}",
        make=partial(draw_boxes, found, metric, len(seeds)),
        purpose=f"box plots of {metric}",
    )


def _histograms(found: Doubt) -> Iterator[Drawing]:
    for set_, shown in found.outside.items():
        yield Drawing(
            _file("outside", set_),
            title=f"Test images and {set_}",
            caption=(
                f"How the {found.score} of the prediction is spread over test images (filled) and over {set_} "
                "(outlined). The less they overlap, the better a model knows what it does not know."
            ),
            alt=f"Histograms of {found.score} on test images and on {set_}, of {', '.join(shown)}",
            make=partial(draw_histograms, shown, found.score),
            purpose=f"histograms of {set_}",
        )


def _roc(found: Doubt) -> Iterator[Drawing]:
    for set_, curves in found.roc.items():
        yield Drawing(
            _file("roc", set_),
            title=f"Finding {set_}",
            caption=(
                f"Images of {set_} found (up) against test images taken for them (right), for every threshold of the "
                f"{found.score}: the images from outside are the positives. The dotted line is chance. "
                f"Seed {found.seed}."
            ),
            alt=f"ROC curves by {found.score} for telling {set_} from test images, of {', '.join(curves)}",
            make=partial(draw_roc, curves),
            purpose=f"ROC curves of {set_}",
        )


def _word(metric: str, *, capital: bool = True) -> str:
    word = TITLES[metric].removesuffix(" (%)") if metric in PERCENT else TITLES[metric]
    return word[0].upper() + word[1:] if capital else word


def _file(kind: str, name: str) -> str:
    """A name of a file that any label or path may give."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'set'}"


def _auroc(found: Any) -> Item:
    value = (found or {}).get("auroc")
    if not value:
        return Item("–")
    spread = "" if value["std"] is None else f"± {100 * value['std']:.1f}"
    return Item(f"{100 * value['mean']:.1f}", spread, 100 * value["mean"])
