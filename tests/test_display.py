"""Results as tables and figures."""

import sys

import pytest
import torch

import enfold
from enfold.costs import Cost, Costs, Latency, Ratios
from enfold.display import format_bytes, format_count, html_table, text_table
from enfold.errors import EnfoldError, MissingExtra
from enfold.train.history import Epoch, History

START = Epoch(-1, [], [2.0, 2.2], [0.1, 0.1], 2.1, 0.0, 0.0, ensemble_score=0.1)
EPOCHS = [
    Epoch(n, [1.5 - n, 1.7 - n], [1.0 - 0.1 * n, 1.2], [0.5, 0.4], 0.9, 1e-3, 1.0, ensemble_score=0.6) for n in range(2)
]
HISTORY = History(EPOCHS, [2, 1], START)


def test_cells_are_escaped():
    found = html_table(["<b>"], [["<script>"], ["a & b"]], "<i>", chosen=[1])
    assert "<script>" not in found
    assert "<b>" not in found
    assert "<i>" not in found
    assert found.count("<tr") == 3
    assert "<tr class='chosen' style='font-weight:600'><td>a &amp; b</td></tr>" in found


def test_text_is_aligned():
    assert text_table(["", "ms"], [["one", 10], ["three", 2.5]]) == "        ms\none     10\nthree  2.5"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(1000), "1.00 kB"),
        (format_bytes(2.5e6), "2.50 MB"),
        (format_count(999), "999"),
        (format_count(11_200_000), "11.20 M"),
    ],
)
def test_units(found, text):
    assert found == text


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def lines(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_a_history_draws_members_their_mean_and_the_training_loss(pyplot):
    axes = HISTORY.plot()
    found = lines(axes)
    assert [len(values) for values in found.values()] == [3, 3, 3, 2]
    assert found["members"] == [2.0, 1.0, 0.9]
    assert found["validation nll"] == [2.1, 0.9, 0.9]
    assert found["training loss"] == [1.6, pytest.approx(0.6)]
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2]
    _, given = pyplot.subplots()
    assert HISTORY.plot("accuracy", given) is given
    assert lines(given)["validation accuracy"] == [0.1, 0.6, 0.6]
    assert len(pyplot.get_fignums()) == 2


def test_what_cannot_be_drawn_is_named(monkeypatch):
    with pytest.raises(EnfoldError, match="nll or accuracy, got 'ece'"):
        HISTORY.plot("ece")
    with pytest.raises(EnfoldError, match="train first"):
        History().plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'enfold\[report\]'"):
        HISTORY.plot()


def test_a_history_is_one_line_of_text_and_a_table_of_at_most_twelve_epochs():
    assert repr(HISTORY) == "History of 2 epochs: train/loss 0.6  val/nll 0.9  val/accuracy 0.6"
    assert repr(History()) == "History of 0 epochs"
    header, rows = HISTORY.rows()
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[2][header.index("mean_member/val/nll")] == "1.05"
    assert not any(name.startswith("member_") for name in header)
    long = History([Epoch(n, [1.0], [1.0], [0.5], None, 1e-3, 1.0) for n in range(100)])
    numbers = [int(row[0]) for row in long.rows()[1]]
    assert len(numbers) == 12
    assert (numbers[0], numbers[-1]) == (1, 100)
    assert "<td>100</td>" in long._repr_html_()


def test_data_shows_its_splits():
    split = enfold.Split(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(split.inputs, split.targets), batch_size=2)
    data = enfold.Data(split, split, loader, 2, (2,), names=("<a>", "b"))
    assert repr(data) == "Data(in memory: train 3, val 3, test 2 batches, inputs 2, 2 classes)"
    assert data.rows()[0] == ["train", "3", "float32 2", "int64 number"]
    assert data.rows()[2] == ["test", "2 batches", "DataLoader", "-"]
    assert "2 classes: &lt;a&gt;, b" in data._repr_html_()


def test_costs_have_their_ratios():
    ratios = Ratios(2.0, 2.0, None, 2.0, None, {1: 1.5})
    costs = Costs({"one": Cost(2000, 2000, 8000, 4000, 2, None, {1: Latency(1.5e-3, 1e-3, 2e-3, 3e-3)}, ratios)})
    (row,) = costs.rows()
    assert row == ["one", "2.00 k (2.00x)", "8.00 kB (2.00x)", "4.00 k", "-", "1.5 [1, 2] (1.50x)"]
    assert len(costs.header()) == len(row)
    assert "8.00 kB (2.00x)" in str(costs)
    assert "<td>one</td>" in costs._repr_html_()
    assert "8.00 kB" in costs["one"]._repr_html_()


@pytest.mark.parametrize(("lower", "shown"), [(1.0e-3, "(equal)"), (1.3e-3, "(1.50x)")])
def test_latencies_with_overlapping_quartiles_are_equal(lower, shown):
    ratios = [Ratios(1.0, 1.0, 1.0, 1.0, None, {1: ratio}) for ratio in (1.0, 1.5)]
    one = Cost(1, 1, 4, 2, 1, None, {1: Latency(1.0e-3, 0.9e-3, 1.2e-3, 1.3e-3)}, ratios[0])
    two = Cost(1, 1, 4, 2, 1, None, {1: Latency(1.5e-3, lower, 1.6e-3, 1.7e-3)}, ratios[1])
    (_, *_, own), (_, *_, other) = Costs({"one": one, "two": two}, "one").rows()
    assert own.endswith("(1.00x)")
    assert other.endswith(shown)


def test_a_row_shows_all_scores():
    row = enfold.Row("net", {"accuracy": 0.5, "cece": 0.25, "temperature": 1.5}, 0.4)
    found = row._repr_html_()
    assert all(text in found for text in ("50.00 %", "25.00 %", "1.5000", "40 %", "gain recovered"))
