"""An analysis that was computed before is read, not computed again."""

import json
from pathlib import Path

import pytest

from enfold.run import RunDirectory, landscape, parse_recipe
from enfold.run.analyses import home
from enfold.run.execute import seed_runs, train
from studies.analyses import run_analysis


@pytest.mark.slow
def test_a_finished_analysis_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "data: {source: fashion-mini, train_size: 64, val_size: 60}\nnetwork: {name: mlp, widths: [5]}\nmembers: 2\n"
    run = RunDirectory.create(tmp_path / "run", parse_recipe(text + "seeds: [4, 2]\ntrain: {epochs: 0}\n"))
    train(run, run.recipe())
    seed_run = seed_runs(run, run.recipe())[1]
    settings = {"only": ("similarity",), "examples": 50}
    first = run_analysis("landscape", seed_run, settings)
    monkeypatch.setattr(landscape, "_compute_in_time", None)  # computing again would fail
    assert run_analysis("landscape", seed_run, settings) == first
    facts = json.loads((home("landscape", seed_run) / "similarity.json").read_text())["facts"]
    assert first["similarity"]["cosine_between"] == facts["cosine_between"]
