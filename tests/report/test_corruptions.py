"""Figures of scores under shift and of uncertainty: names of models, given values, and alternative texts of files."""

from functools import partial

import pytest
import torch
from matplotlib import style

from enfold.analysis.corruptions import summarize_by_kind
from enfold.errors import EnfoldError
from enfold.metrics import reliability_band, risk_coverage, roc
from enfold.metrics.predictions import Predictions
from enfold.report.corruptions import COLOURS, draw_boxes, draw_heat_map, select_models
from enfold.report.figure import STYLE, write_figure
from enfold.report.uncertainty import draw_curves, draw_histograms, draw_reliability, draw_roc


@pytest.fixture(autouse=True)
def _style():
    with style.context(["default", STYLE]):
        yield


def scores(base):
    return {
        kind: {str(s): {"accuracy": base - 0.05 * s * (1 + k), "nll": 1.0, "ece": 0.1, "brier": 0.5} for s in (1, 3)}
        for k, kind in enumerate(("fog", "glass_blur"))
    }


SEEDS = [{"mean member": scores(0.8), "ensemble": scores(0.9)}, {"mean member": scores(0.82), "ensemble": scores(0.88)}]


def found(metric="accuracy"):
    return {label: summarize_by_kind([seed[label] for seed in SEEDS], metric) for label in SEEDS[0]}


def answers(N=200):
    draw = torch.Generator().manual_seed(0)
    return Predictions.from_logits(2 * torch.randn(N, 3, generator=draw), torch.randint(3, (N,), generator=draw))


def test_a_cell_is_the_mean_over_severities_and_seeds():
    axes = draw_heat_map(found(), "accuracy", 2).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["71.0", "79.0", "61.0", "69.0", "66.0", "74.0"]  # kinds row by row, then their mean
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["fog", "glass blur", "mean"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["mean member", "ensemble"]
    assert "2 seeds" in axes.get_title(loc="left")


def test_boxes_are_of_kinds_by_severity():
    axes = draw_boxes(found(), "accuracy", 2).axes[0]
    medians = sorted(round(float(line.get_ydata()[0]), 1) for line in axes.lines if len(set(line.get_ydata())) == 1)
    assert 73.5 in medians  # severity 1 of the mean member: the middle of 76 and 71
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mean member", "ensemble"]


@pytest.mark.slow
def test_files_are_written_with_their_alt_text(tmp_path):
    p = answers()
    one, other = torch.rand(50), torch.rand(40) + 0.5
    coverage = risk_coverage(p)
    makers = {
        "corruptions": partial(draw_heat_map, found(), "accuracy", 2),
        "severities": partial(draw_boxes, found("nll"), "nll", 2),
        "reliability": partial(draw_reliability, {"one": reliability_band(p, bins=5, replicates=50)}),
        "risk": partial(draw_curves, {"one": (coverage.coverage, coverage.risk)}, "coverage", "error"),
        "roc": partial(draw_roc, {"one": roc(one, other)}),
        "ood": partial(draw_histograms, {"noise": (one, other)}, "entropy (nats)"),
    }
    written = [write_figure(make, tmp_path, name, name, f"the figure {name}") for name, make in makers.items()]
    assert [path.suffix for paths in written for path in paths] == [".svg", ".png"] * 6
    for name, (svg, png) in zip(makers, written, strict=True):
        assert f"the figure {name}" in svg.read_text()
        assert f"the figure {name}".encode() in png.read_bytes()


def test_a_diagram_shows_the_filled_bins_and_their_counts():
    band = reliability_band(answers(), bins=5, replicates=50)
    top, below = draw_reliability({"one": band}).axes
    filled = band.diagram.counts > 0
    assert top.lines[1].get_ydata().tolist() == pytest.approx((100 * band.diagram.accuracy[filled]).tolist())
    assert [bar.get_height() for bar in below.patches] == band.diagram.counts.tolist()


def test_histograms_are_fractions_on_one_scale():
    figure = draw_histograms({"a": (torch.rand(50), torch.rand(9)), "b": (torch.rand(7), 5 + torch.rand(3))}, "entropy")
    first, second = figure.axes
    for axes in (first, second):
        assert [patch.get_data().values.sum() for patch in axes.patches] == pytest.approx([100] * 3)
        assert axes.get_ylim()[1] >= max(patch.get_data().values.max() for patch in axes.patches)
    assert (first.patches[0].get_data().edges == second.patches[0].get_data().edges).all()


def test_invalid_figures_are_refused():
    many = {str(index): summarize_by_kind([scores(0.5)], "accuracy") for index in range(len(COLOURS) + 1)}
    with pytest.raises(EnfoldError, match="at most"):
        draw_boxes(many, "accuracy", 1)
    with pytest.raises(EnfoldError, match="did you mean 'ensemble'"):
        select_models(SEEDS, ["ensembel"])
    with pytest.raises(EnfoldError, match="at least one seed"):
        select_models([], None)
    with pytest.raises(EnfoldError, match="models"):
        draw_roc({})
