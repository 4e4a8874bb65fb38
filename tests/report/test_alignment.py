"""Figures and tables of an analysis of alignment, from stored results only."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enfold.errors import MissingExtra
from enfold.report import alignment as figures
from enfold.report.alignment import (
    draw_alignment,
    draw_averages,
    draw_line,
    draw_planted,
    draw_rows,
    draw_softness,
    draw_sweep,
)
from enfold.report.alignment_matrices import draw_matrices
from enfold.report.alignment_table import alignment_tables, study_cells

ALPHAS = [0.0, 0.5, 1.0]


def _line(accuracy: list[float], loss: list[float]) -> dict[str, Any]:
    height = {"height": 0.1, "at": 0.5, "area": 0.05}
    return {"alphas": ALPHAS, "accuracy": accuracy, "loss": loss, "barrier": {"loss": height, "error": height}}


def _change(before: float, after: float) -> dict[str, float]:
    return {"before": before, "after": after}


def _rows(layer: str, hidden: bool) -> dict[str, Any]:
    changes = {name: _change(0.5, 0.25) for name in ("distance", "deviation", "correlation", "length")}
    return {"layer": layer, "units": 8, "hidden": hidden, **changes}


def _scores(accuracy: float) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": 1 - accuracy}


SWEEP = [
    {"temperature": 0.1, "accuracy": 0.8, "nll": 0.5, "softness": {"hidden.0": 0.1}, "failed": None},
    {"temperature": 1.0, "accuracy": 0.9, "nll": 0.4, "softness": {"hidden.0": 0.2}, "failed": None},
    {"temperature": 10.0, "accuracy": None, "nll": None, "softness": None, "failed": "it is singular"},
]
FOUND: dict[str, Any] = {
    "rows": [_rows("hidden.0", True), _rows("head", False)],
    "line": {"stored": {"naive": _line([0.9, 0.6, 0.8], [0.3, 9, 0.4]), "permAVG": _line([0.9] * 3, [0.3] * 3)}},
    "matrices": [{"group": "hidden.0", "units": 8, "softness": [0.25], "condition": [1.5], "one_to_one": [1.0]}],
    "averages": {
        "naive": {"1": _scores(0.9), "2": _scores(0.7), "3": _scores(0.5)},
        "weight matching": {"2": _scores(0.88), "3": _scores(0.87)},
        "permAVG": {"2": _scores(0.9)},
        "ensemble": {"2": _scores(0.91)},
        "mean member": {"2": _scores(0.85)},
    },
    "sweep": SWEEP,
    "planted": [
        {"noise": noise, "recovered": {"permAVG": None, "weight matching": 1 - noise}, "chance": 0.01}
        for noise in (0.0, 0.5)
    ],
    "different": [
        {
            "difference": "classes",
            "members": [0.5, 0.4],
            "naive": _scores(0.3),
            "matched": _scores(0.35),
            "learned": _scores(0.6),
            "rows": [_rows("hidden.0", True)],
            "softness": {"hidden.0": 0.3},
        }
    ],
}
MATRICES = {"hidden.0": np.eye(8)[None]}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all figures that are drawn, of which none is written: that takes long."""
    names: list[str] = []
    monkeypatch.setattr(
        figures, "write_figure", lambda make, folder, name, purpose, alt: (make() and names.append(name)) or []
    )
    return names


def test_every_section_has_its_figures(tmp_path: Path, drawn: list[str]) -> None:
    draw_alignment(FOUND, MATRICES, tmp_path)
    assert drawn == ["rows", "line", "averages", "softness", "matrices", "sweep", "planted", "different"]
    listed = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]
    assert [each["file"] for each in listed] == [f"{name}.svg" for name in drawn], "in the order of a page"
    assert all(len(each["caption"]) > 100 for each in listed)


def test_missing_sections_have_no_figure(tmp_path: Path, drawn: list[str]) -> None:
    several = dict.fromkeys(("stored", "reset"), FOUND["line"]["stored"])
    draw_alignment({"line": several}, {}, tmp_path)
    assert drawn == ["line-stored", "line-reset"]


def test_a_figure_is_written_as_svg_and_png(tmp_path: Path) -> None:
    written = draw_alignment({"planted": FOUND["planted"]}, {}, tmp_path)
    assert [path.name for path in written] == ["planted.svg", "planted.png", "figures.json"]
    assert all(path.stat().st_size > 1000 for path in written[:2])
    listed = json.loads(written[2].read_text(encoding="utf-8"))["figures"]
    assert [each["file"] for each in listed] == ["planted.svg"]
    assert all(listed[0][key] for key in ("title", "caption", "alt"))


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw_alignment(FOUND, MATRICES, tmp_path)
    assert not list(tmp_path.iterdir())


def test_lines_are_in_their_units_and_a_wide_loss_is_on_a_log_scale() -> None:
    left, right = draw_line(FOUND["line"]["stored"]).axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([90, 60, 80])
    assert "(%)" in left.get_ylabel()
    assert "nats" in right.get_ylabel()
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    assert draw_line({"permAVG": _line([0.9] * 3, [0.3] * 3)}).axes[1].get_yscale() == "linear"


def test_rows_name_the_output_layer() -> None:
    axes = draw_rows(FOUND["rows"]).axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["hidden.0", "head (output)"]
    ends = [artist.get_xdata()[0] for artist in axes[1].lines if (artist.get_gid() or "").startswith("end:distance")]
    assert ends == [0.25, 0.25]


def test_a_large_matrix_is_shown_in_blocks_and_its_rows_by_how_hard_they_are() -> None:
    order = np.random.default_rng(0).permutation(200)
    hardness = np.linspace(0.5, 1, 200)
    matrix = np.full((200, 200), 0.001)
    matrix[np.arange(200), order] = hardness
    whole, hard, soft = (axes.images[0].get_array() for axes in draw_matrices({"a": matrix}).axes[:3])
    assert whole.shape == (50, 50)
    assert whole.max() == pytest.approx(1)
    assert hard.shape == soft.shape == (24, 24)
    np.testing.assert_allclose(np.diag(hard), hardness[::-1][:24])
    np.testing.assert_allclose(np.diag(soft), hardness[:24][::-1])
    assert whole[10, order[40:44] // 4].min() > 0.5


def test_a_temperature_that_failed_is_named_and_not_drawn() -> None:
    figure = draw_sweep(SWEEP, FOUND["averages"])
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["singular"]
        assert len(axes.lines[0].get_xdata()) == 2
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["permAVG", "ensemble", "mean member"]


def test_a_sweep_is_drawn_beside_the_members_that_are_merged() -> None:
    """Not beside all: 0.9 is the mean of all members, 0.85 that of the first two."""
    accuracies, losses, _ = draw_sweep(SWEEP, FOUND["averages"]).axes
    assert accuracies.get_title(loc="left") == "permAVG of members 1 to 2 at several temperatures"
    assert [line.get_ydata()[0] for line in accuracies.lines[1:3]] == pytest.approx([91, 85])
    assert [line.get_ydata()[0] for line in losses.lines[1:3]] == pytest.approx([0.09, 0.15])
    low, high = losses.get_ylim()
    assert low < 0.09 < 0.15 < high
    ensemble, mean = losses.lines[1:3]
    assert ensemble.get_linewidth() > 2 * mean.get_linewidth(), "seen where the other lies on it"


def _transformer(blocks: int, heads: int = 12) -> dict[str, int]:
    units = {"embed": 64}
    for block in range(blocks):
        layer = f"encoder.layers.{block}.self_attention.in_proj_weight"
        units |= {f"{layer} in blocks of 8": heads, layer: 8}
        units |= {f"{layer} from {8 * head}": 8 for head in range(1, 3 * heads)}
        units[f"encoder.layers.{block}.linear1"] = 96
    return units


def _fits(figure: Any) -> bool:
    """Whether all artists are inside the figure."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return min(box.x0, box.y0) > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01


@pytest.mark.parametrize("blocks", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4, 24))])
def test_figures_of_any_number_of_groups_are_readable(blocks: int) -> None:
    units = _transformer(blocks)
    groups = [{"group": name, "units": number, "softness": [0.5, 1.0]} for name, number in units.items()]
    points = [{**SWEEP[0], "temperature": t, "softness": dict.fromkeys(units, 0.5)} for t in (0.1, 1.0, 10.0)]
    rows = [_rows(name, True) for name in units]
    drawn = {
        "rows": draw_rows(rows),
        "softness": draw_softness(groups),
        "matrices": draw_matrices({name: np.eye(number) for name, number in units.items()}),
        "sweep": draw_sweep(points, FOUND["averages"]),
    }
    for name, figure in drawn.items():
        assert _fits(figure), name
        assert max(figure.get_size_inches()) <= 16.1, name
    labels = [label.get_text() for label in drawn["softness"].axes[0].get_yticklabels()]
    assert labels[0] == "embed (64)"
    shown = len(drawn["matrices"].axes) // 3
    assert shown == {0: 1, 1: 4}.get(blocks, 5)
    told = drawn["matrices"].axes[-1].get_xlabel()
    less = drawn["rows"].get_supxlabel()
    assert less == (f"omitted: {len(rows) - 60} layers between these, all in rows.json" if len(rows) > 60 else "")
    edges = [axes.get_position() for axes in drawn["rows"].axes]
    assert all(right.x0 - left.x1 < 0.05 for left, right in pairwise(edges)), "panels stand side by side"
    if blocks == 24:
        assert "omitted: 20 layers between these and 48 kinds of blocks" in told.replace("\n", " ")
        assert len(labels) == 25, "the whole layers"
    else:
        assert ("omitted" in told) is (blocks == 4)


def test_lines_name_their_batch_norm_mode(tmp_path: Path, drawn: list[str]) -> None:
    lines = FOUND["line"]["stored"]
    modes = ("stored", "train", "reset")
    titles = [draw_line(lines, mode).axes[0].get_title(loc="left") for mode in modes]
    draw_alignment({"line": dict.fromkeys(modes, lines)}, {}, tmp_path)
    listed = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]
    for words in (titles, [each["title"] for each in listed], [each["caption"] for each in listed]):
        assert len(set(words)) == 3
    assert titles[2] == "On the straight line between two members, batch-norm statistics measured again"
    assert draw_line(lines).axes[0].get_title(loc="left") == "On the straight line between two members"


def test_averages_mark_points_at_other_numbers() -> None:
    (axes,) = draw_averages(FOUND["averages"]).axes
    places = {line.get_label(): line.get_xdata().tolist() for line in axes.lines}
    assert places["permAVG"] == [1.85]
    assert places["ensemble"] == [2.15]
    assert "permAVG and the ensemble, of 2, stand to its left and right" in axes.get_xlabel()


def test_matrices_are_unsorted_and_rows_sorted_by_hardness() -> None:
    matrix = np.eye(8)[[3, 1, 0, 2, 7, 6, 5, 4]]
    whole, rows = draw_matrices({"1": matrix}).axes[:2]
    np.testing.assert_array_equal(whole.images[0].get_array(), matrix)
    np.testing.assert_array_equal(rows.images[0].get_array(), np.eye(8))
    assert (whole.get_title(loc="left"), whole.get_xlabel()) == ("layer 1\n8 units", "units of member 2")
    assert (rows.get_title(loc="left"), rows.get_xlabel()) == (
        "all rows, the hardest first",
        "their columns, in the same order",
    )


def test_missing_methods_are_omitted_from_the_planted_figure() -> None:
    axes = draw_planted(FOUND["planted"]).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["weight matching"]


def test_tables_have_a_cell_for_every_column_and_mark_failures() -> None:
    cells = study_cells(FOUND)
    assert len(cells) == len(FOUND) == len(alignment_tables(FOUND))
    for _, header, rows in cells:
        assert rows
        assert {len(row) for row in rows} == {len(header)}
    by_title = {title.split(",")[0]: rows for title, _, rows in cells}
    sweep = study_cells({"sweep": [{**SWEEP[0], "softness": dict.fromkeys(_transformer(24), 0.5)}]})[0]
    assert len(sweep[1]) == 7
    assert sweep[0].endswith("on test data; softness omitted: 21 layers between these and 48 kinds of blocks and of "
                             "units inside them, all in sweep.json")  # fmt: skip
    assert by_title["permAVG by temperature"][2] == ["10", "singular", "-", "-"]
    assert by_title["interpolation"][0][:5] == ["naive", "stored", "60.00", "60.00", "90.00"]
    assert by_title["accuracy on test data (%)"][2] == ["permAVG", "-", "90.00", "-"]
