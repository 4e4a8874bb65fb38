import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import style

from enfold.errors import MissingExtra
from enfold.report.figure import ASIDE, KINDS, STYLE, Point, draw, draw_quality_cost, read_points, split_outliers
from enfold.report.label_placement import overlaps


@pytest.fixture(autouse=True)
def _style() -> Iterator[None]:
    with style.context(["default", STYLE]):
        yield


def _summary(rows: dict[str, tuple[float, float, float | None]], efficient: tuple[str, ...] = ()) -> dict[str, Any]:
    """A stored result of rows (cost, NLL, deviation)."""
    return {
        "recipe": {"steps": []},
        "rows": {
            name: {
                "scores": {"nll": {"mean": nll, "std": std}},
                "cost": {"ratios": {"flops": cost}},
                **({"diversity": {"disagreement": 0.1}} if name in efficient else {}),
            }
            for name, (cost, nll, std) in rows.items()
        },
    }


FEW = {"mean member": (1.0, 0.5, 0.01), "ensemble": (4.0, 0.42, 0.01), "kd": (1.0, 0.44, 0.01)}


def _crowd(dear: float = 4.0) -> dict[str, Any]:
    """20 rows, most of them of the same two costs and close in NLL, two of them far off the scale."""
    rows: dict[str, tuple[float, float, float | None]] = {**FEW, "control": (1.0, 0.496, 0.01)}
    efficient = [f"some-ensemble-{number}" for number in range(8)]
    rows |= {name: (4.0 if number else dear, 0.43 + 0.006 * number, 0.02) for number, name in enumerate(efficient)}
    rows |= {f"a-network-{number}": (1.0, 0.45 + 0.005 * number, 0.015) for number in range(6)}
    rows |= {"average": (1.0, 2.3, 0.1), "broken-ensemble": (4.0, 1.9, 0.1)}
    return _summary(rows, (*efficient, "broken-ensemble"))


@cache
def _crowded() -> Any:
    return draw(read_points(_crowd()))


def _extents(figure: Any, what: str) -> dict[str, np.ndarray]:
    """The boxes, as rendered for the PNG, of all labels or of all markers."""
    figure.set_dpi(160)
    found = [artist for artist in figure.findobj() if (artist.get_gid() or "").startswith(what)]
    return {artist.get_gid().removeprefix(what): np.array(artist.get_window_extent().extents) for artist in found}


def _artist(figure: Any, gid: str) -> Any:
    (found,) = (artist for artist in figure.findobj() if artist.get_gid() == gid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("summary", [_summary(FEW), _crowd(), _crowd(dear=30.0)], ids=["3", "20", "20 log"])
def test_labels_do_not_overlap(summary: dict[str, Any]) -> None:
    figure = draw(read_points(summary))
    labels, markers = _extents(figure, "label:"), _extents(figure, "marker:")
    assert set(labels) == set(markers) == set(summary["rows"])
    boxes = np.stack(list(labels.values()))
    assert not np.triu(overlaps(boxes, boxes), 1).any()
    assert not overlaps(boxes, np.stack(list(markers.values()))).any()
    page = np.array(figure.bbox.extents)
    assert (boxes[:, :2] >= page[:2]).all()
    assert (boxes[:, 2:] <= page[2:]).all()


def test_markers_do_not_overlap() -> None:
    markers = np.stack(list(_extents(_crowded(), "marker:").values()))
    middles = (markers[:, :2] + markers[:, 2:]) / 2
    apart = np.linalg.norm(middles[:, None] - middles[None], axis=-1)[np.triu_indices(len(markers), 1)]
    assert apart.min() > 8 * 160 / 72


def test_only_overlapping_points_are_shifted() -> None:
    moved = draw(read_points(_summary({**FEW, "twin": (1.0, 0.44, 0.01)})))
    aside = [abs(_artist(moved, f"marker:{name}").get_xdata()[0] - 1) > 0.01 for name in ("kd", "twin")]
    assert sorted(aside) == [False, True]
    assert ASIDE in moved.axes[0].get_xlabel()
    alone = draw(read_points(_summary(FEW)))
    for name, (cost, nll, _) in FEW.items():
        shown = _artist(alone, f"marker:{name}")
        np.testing.assert_allclose([shown.get_xdata()[0], shown.get_ydata()[0]], [cost, nll])
    assert ASIDE not in alone.axes[0].get_xlabel()


def test_the_mean_member_and_the_ensemble_are_not_shifted() -> None:
    places = {name: _artist(_crowded(), f"marker:{name}").get_xdata()[0] for name in ("mean member", "ensemble")}
    assert places == {"mean member": pytest.approx(1), "ensemble": pytest.approx(4)}


def test_each_kind_has_its_colour_and_its_shape() -> None:
    figure = _crowded()
    names = {"member": "mean member", "ensemble": "ensemble", "efficient": "some-ensemble-3", "network": "kd"}
    looks = {}
    for kind, name in {**names, "control": "control"}.items():
        marker = _artist(figure, f"marker:{name}")
        looks[kind] = (marker.get_color(), marker.get_marker())
        assert looks[kind] == (KINDS[kind].colour, KINDS[kind].marker)
    assert len({colour for colour, _ in looks.values()}) == len({shape for _, shape in looks.values()}) == 5
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["mean member", "ensemble", "efficient ensemble", "distilled or merged", "control"]
    assert figure.axes[0].get_legend().get_window_extent().x1 <= figure.bbox.x1


def test_the_legend_lists_present_kinds_only() -> None:
    legend = draw(read_points(_summary(FEW))).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["mean member", "ensemble", "distilled or merged"]


def test_kinds_follow_the_number_of_members() -> None:
    summary = _summary({**FEW, "ensemble-like": (1.0, 0.5, None), "control-2": (1.0, 0.5, None)}, ("ensemble-like",))
    summary["rows"]["ensemble of 2"] = {"scores": {"nll": {"mean": 0.47, "std": None}}, "cost": None}
    kinds = {point.name: point.kind for point in read_points(summary)}
    assert kinds == {
        "mean member": "member",
        "ensemble": "ensemble",
        "kd": "network",
        "ensemble-like": "efficient",
        "control-2": "control",
    }


@pytest.mark.parametrize(("dear", "scale"), [(4.0, "linear"), (8.0, "linear"), (8.1, "log"), (30.0, "log")])
def test_the_cost_axis_is_logarithmic_for_a_wide_range(dear: float, scale: str) -> None:
    axes = draw(read_points(_summary({**FEW, "dear": (dear, 0.45, None)}))).axes[0]
    assert axes.get_xscale() == scale
    assert ("log scale" in axes.get_xlabel()) == (scale == "log")
    low, high = axes.get_xlim()
    assert low < 1 < dear < high


def test_axes_carry_units_and_better_is_up() -> None:
    axes = draw(read_points(_summary(FEW))).axes[0]
    assert "nats" in axes.get_ylabel()
    assert "relative to a single network" in axes.get_xlabel()
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert axes.xaxis.get_major_formatter()(2.0, None) == "2×"


def test_outliers_have_a_separate_panel_with_values() -> None:
    figure = _crowded()
    main, strip = figure.axes
    worst, best = main.get_ylim()
    assert best < 0.42 < 0.5 < worst < 0.6
    texts = {text.get_gid(): text.get_text() for text in strip.texts if text.get_gid()}
    assert texts == {"label:broken-ensemble": "broken-ensemble: 1.90 nats", "label:average": "average: 2.30 nats"}
    edge = main.get_window_extent().y0
    for name in ("average", "broken-ensemble"):
        box = _artist(figure, f"label:{name}").get_window_extent()
        assert box.y1 < edge
        assert strip.get_window_extent().y0 <= box.y0
    arrows = [text for text in strip.texts if text.arrow_patch is not None]
    assert [arrow.xy[0] for arrow in arrows] == [4.0, 1.0]
    assert strip.get_yticklabels()[0].get_text() == "off the\nscale"


def test_one_panel_without_outliers() -> None:
    assert len(draw(read_points(_summary(FEW))).axes) == 1


def test_error_bars_are_thin_and_absent_for_one_seed() -> None:
    several, one = (
        draw(read_points(_summary({n: (c, v, std) for n, (c, v, _) in FEW.items()}))) for std in (0.01, None)
    )
    bars = several.axes[0].collections
    assert len(bars) == 3
    assert all(bar.get_linewidth()[0] < 1 for bar in bars)
    assert not one.axes[0].collections


def test_an_infinite_nll_is_an_outlier() -> None:
    rows = {**FEW, "lost": (1.0, math.nan, None), "never": (1.0, math.inf, None)}
    near, away = split_outliers(read_points(_summary(rows)))
    assert [point.name for point in near] == list(FEW)
    assert [point.name for point in away] == ["never", "lost"]
    assert len(draw(read_points(_summary(rows))).axes) == 2


def test_only_far_worse_rows_are_outliers() -> None:
    values = {"mean member": 0.5, "ensemble": 0.4, "kd": 0.45, "bad": 0.79, "too-bad": 0.81}  # 0.5 + 3 x 0.1
    near, away = split_outliers(read_points(_summary({name: (1.0, nll, None) for name, nll in values.items()})))
    assert [point.name for point in near] == ["mean member", "ensemble", "kd", "bad"]
    assert [point.name for point in away] == ["too-bad"]


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=20))
def test_at_most_half_of_the_rows_are_outliers(values: list[float]) -> None:
    points = [Point(str(index), "network", 1.0, value, 0.0) for index, value in enumerate(values)]
    near, away = split_outliers(points)
    assert {*near, *away} == set(points)
    assert len(away) <= len(near)
    assert all(point.nll > max(each.nll for each in near) for point in away)


@pytest.mark.slow
def test_files_do_not_depend_on_matplotlib_settings(tmp_path: Path) -> None:
    first = draw_quality_cost(_crowd(), tmp_path / "first")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": None}):
        second = draw_quality_cost(_crowd(), tmp_path / "second")
    assert [path.name for path in first] == ["quality-cost.svg", "quality-cost.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_backend_is_not_changed(tmp_path: Path) -> None:
    with matplotlib.rc_context():
        matplotlib.use("svg")
        draw_quality_cost(_summary(FEW), tmp_path)
        assert matplotlib.get_backend().lower() == "svg"


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw_quality_cost(_summary(FEW), tmp_path)
    assert not list(tmp_path.iterdir())
