"""The study of compress: cells are stored, reused and summarized."""

import json
import sys

import pytest

import enfold
from enfold.train import TrainConfig
from studies.compress import __main__ as script
from studies.compress import run, settings, tables
from studies.compress.settings import Setting

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def tiny(monkeypatch):
    setting = Setting(
        "tiny MLP on fashion-mini",
        lambda seed: enfold.data.load("fashion-mini", train_size=100, val_size=100, seed=seed),
        {"name": "mlp", "widths": [8]},
        TrainConfig(epochs=2, batch_size=50, lr=1e-2, select="last"),
        {"lr": 1e-2},
        stacked=True,
    )
    monkeypatch.setitem(settings.SETTINGS, "tiny", setting)
    return setting


@pytest.mark.slow
def test_cells_are_stored_and_summarized(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    words = ["compress", "tiny", "--seed", "0", "--seed", "1", "--rows", "control,distill,ema,compress"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "cells"), "--write"])
    script.main()
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").rglob("*.*")}
    script.main()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").rglob("*.*")} == first

    record = json.loads((tmp_path / "compress-tiny.json").read_text())
    rows = record["rows"]
    assert list(rows) == ["mean member", "member + temperature", "ensemble", "control", "distill", "ema", "compress"]
    assert rows["ensemble"]["last"]["gain nll"]["values"] == [1.0, 1.0]
    assert rows["member + temperature"]["last"]["gain cnll"]["values"] == [0.0, 0.0]
    assert rows["member + temperature"]["last"]["nll"] == rows["mean member"]["last"]["cnll"]
    assert len(rows["compress"]["recommended"]) == 2
    assert tables.compress_table(record).count("\n") == 2 + len(rows)
    assert "compress" in capsys.readouterr().out


@pytest.mark.slow
def test_last_and_best_epochs_are_those_of_separate_trainings(tiny, tmp_path):
    cells = run.Cells("tiny", 0, tmp_path)
    found = cells.train("distill")
    config = cells.config(run.ROWS["distill"])
    for select in ("last", "best"):
        network = enfold.distill(
            cells.ensemble, cells.data, init=cells.best_member(), config=config.replace(select=select), quiet=True
        )
        assert cells.scores(network)["test"]["nll"] == pytest.approx(found[select]["test"]["nll"], rel=1e-6)
