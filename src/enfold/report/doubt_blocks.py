"""Sections on doubt and shift: calibration, what is left when unsure answers are, corrupted and foreign inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from enfold.report.blocks import Block, Figure, Item, Table
from enfold.report.content import ONE, Content
from enfold.report.doubt import draw_curves, draw_histograms, draw_reliability
from enfold.report.figure import kind_of
from enfold.report.shift import COLOURS, TITLES, chosen_models, draw_boxes, draw_heat_map
from enfold.report.svg import drawn
from enfold.shift import by_kind

WORDS = {  # of scores whose names are not words
    "dempster_shafer": "Dempster–Shafer",
    "epkl": "expected pairwise divergence",
    "rmi": "reverse mutual information",
}


def calibration_blocks(content: Content) -> list[Block]:
    """A reliability diagram a model."""
    found = content.doubt
    if found is None:
        return []
    blocks: list[Block] = []
    for label, band in found.bands.items():
        gap = float((band.diagram.weights * band.diagram.gap).sum())
        word = "too sure" if gap > 0 else "not sure enough"
        count = int(band.diagram.counts.sum())
        blocks.append(
            Figure(
                title=label,
                caption=f"{100 * abs(gap):.1f} points {word} on the whole; seed {found.seed}, {count:,} examples.",
                alt=f"Reliability diagram of {label}: accuracy in bins of confidence with a 95 % band, counts below",
                svg=drawn(partial(draw_reliability, {label: band}), "reliability diagrams"),
                small=True,
            )
        )
    return blocks


def coverage_blocks(content: Content) -> list[Block]:
    """Risk against coverage."""
    found = content.doubt
    if found is None:
        return []
    curves = {label: (100 * each.coverage, 100 * each.risk) for label, each in found.coverage.items()}
    axes = "coverage: examples kept, most certain first (%)", "error among those kept (%)"
    return [
        Figure(
            title="Risk and coverage",
            caption=(
                "Keep the answers that a model is surest of, leave the rest to someone else: the error among those "
                "kept (up) for each share kept (right). Lower is better; a curve that rises steadily means that "
                f"confidence tells right from wrong. Seed {found.seed}."
            ),
            alt=f"Error among the most certain test examples against the share kept, of {', '.join(curves)}",
            svg=drawn(lambda: draw_curves(curves, *axes), "risk-coverage curves"),
        )
    ]


def corruption_blocks(content: Content) -> list[Block]:
    """All models by kind, and those that a reader compares by severity."""
    seeds = [seed.corrupted["rows"] for seed in content.seeds if seed.corrupted is not None]
    known = chosen_models(seeds, None) if seeds else []
    if not known:
        return []
    found = {label: by_kind([seed[label] for seed in seeds], "accuracy") for label in known}
    named = [ONE, "ensemble", *([content.headline.label, content.headline.control] if content.headline else [])]
    compared = [label for label in named if label in known][: len(COLOURS)] or known[:4]
    blocks: list[Block] = [
        Figure(
            title="By kind of corruption",
            caption=(
                "Accuracy of every model (a column) on test images corrupted in every way (a row), mean over "
                "severities and seeds; darker is worse. Read along a row: a fold that is brighter than the mean member "
                "withstands that corruption better."
            ),
            alt=f"Heat map of accuracy for {len(next(iter(found.values())))} corruptions and {len(known)} models",
            svg=drawn(lambda: draw_heat_map(found, "accuracy", len(seeds)), "the heat map"),
            paper=True,
        )
    ]
    return [*blocks, *(_severities(seeds, compared, metric) for metric in ("accuracy", "nll"))]


def _severities(seeds: list[Any], labels: list[str], metric: str) -> Figure:
    found = {label: by_kind([seed[label] for seed in seeds], metric) for label in labels}
    better, moves = ("Higher", "falls") if metric == "accuracy" else ("Lower", "rises")
    return Figure(
        title=f"{TITLES[metric][0].upper()}{TITLES[metric][1:]} by severity",
        caption=(
            "A box spans the quartiles over kinds of corruption, its whiskers the extremes, the line in it the median. "
            f"{better} is better; what {moves} slower to the right is the more robust."
        ),
        alt=f"Box plots of {TITLES[metric]} by severity of corruption, of {', '.join(labels)}",
        svg=drawn(lambda: draw_boxes(found, metric, len(seeds)), f"box plots of {metric}"),
    )


def outside_blocks(content: Content) -> list[Block]:
    """How well foreign images are told from test images: a table of all models, histograms of some."""
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
    found = content.doubt
    for set_, shown in (found.outside if found else {}).items():
        score = found.score if found else ""
        blocks.append(
            Figure(
                title=f"Test images and {set_}",
                caption=(
                    f"How the {score} of the prediction is spread over test images (filled) and over {set_} "
                    "(outlined). The less they overlap, the better a model knows what it does not know."
                ),
                alt=f"Histograms of {score} on test images and on {set_}, of {', '.join(shown)}",
                svg=drawn(partial(draw_histograms, shown, score), f"histograms of {set_}"),
            )
        )
    return blocks


def _auroc(found: Any) -> Item:
    value = (found or {}).get("auroc")
    if not value:
        return Item("–")
    spread = "" if value["std"] is None else f"± {100 * value['std']:.1f}"
    return Item(f"{100 * value['mean']:.1f}", spread, 100 * value["mean"])
