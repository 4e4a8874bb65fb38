"""`enfold landscape` on a small run: arrays, figures, what is kept, what is left out, and wrong asks."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from enfold.landscape.many import each, predictions
from enfold.landscape.plane import diversity_points
from enfold.metrics import nll
from enfold.report.landscape import DRAWINGS
from enfold.report.landscape_words import WORDS
from enfold.run import RunDirectory, parse_recipe
from enfold.run.execute import cells, execute
from enfold.run.landscape import Asked, stored_parts, study
from enfold.run.stages import Cell
from enfold.run.views import VIEWS

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

RECIPE = """\
name: small
data: {source: DATA, validation: 60}
network: {name: mlp, widths: [8]}
members: 3
trajectory: {every: 1}
cost: false
control: false
plan: {epochs: 3, batch_size: 64, learning_rate: 0.01}
shares: [batch_ensemble]
folds: [average]
"""
CLOSENESS = ("--examples", 50, "--size", 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three members with their trajectory, a share and a fold, on four classes of 4 x 4 images."""
    folder, rng = tmp_path_factory.mktemp("landscape"), np.random.default_rng(0)
    labels, centres = rng.integers(4, size=400), rng.integers(0, 200, size=(4, 1, 4, 4))
    images = (centres[labels] + rng.integers(0, 55, size=(400, 1, 4, 4))).astype(np.uint8)
    np.savez(folder / "d.npz", x_train=images[:300], y_train=labels[:300], x_test=images[300:], y_test=labels[300:])
    recipe = parse_recipe(RECIPE.replace("DATA", str(folder / "d.npz")))
    execute(RunDirectory.create(folder / "run", recipe), recipe)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run to write to."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def cell_in(run: Path) -> Cell:
    opened = RunDirectory.open(run)
    return cells(opened, opened.recipe())[0]


def test_a_recipe_keeps_the_members_trajectory(finished: Path) -> None:
    cell = cell_in(finished)
    assert cell.trajectory().epochs == [0, 1, 2, 3]
    for text, every in (("trajectory: true", 1), ("trajectory: {every: 4}", 4)):
        spec = parse_recipe(text).trajectory
        assert spec is not None
        assert spec.every == every
    assert parse_recipe("trajectory: false").trajectory is None


def test_every_part_is_computed_and_true_and_can_be_drawn(run: Path, tmp_path: Path) -> None:
    cell = cell_in(run)
    found = study(cell, tmp_path / "out", Asked(examples=50, size=3))
    assert {name: part["state"] for name, part in found.items()} == dict.fromkeys(VIEWS, "computed")
    parts = stored_parts(tmp_path / "out")
    members = cell.members()
    said = predictions(members.member(0), each(members), cell.data, examples=50)
    arrays = {name: part[1] for name, part in parts.items()}
    assert arrays["similarity"]["member"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert arrays["similarity"]["epoch"].tolist() == [0, 1, 2, 3] * 3
    accuracy, diversity = diversity_points(said.member(0), said.subset([1, 2]))
    torch.testing.assert_close(arrays["diversity"]["independent training/accuracy"], accuracy)
    torch.testing.assert_close(arrays["diversity"]["independent training/diversity"], diversity)
    assert len(arrays["diversity"]["share: batch_ensemble/accuracy"]) == 3
    assert float(arrays["sizes"]["original/0/nll"][-1]) == pytest.approx(nll(said))
    for path in ("straight", "matched", "bezier", "tunnel"):
        assert float(arrays["paths"][f"{path}/loss"][0]) == pytest.approx(nll(said.member(0)))
        assert float(arrays["paths"][f"{path}/loss"][-1]) == pytest.approx(nll(said.member(1)))
    assert "share: batch_ensemble/loss" in arrays["paths"]
    for name, (content, tensors) in parts.items():
        _can_be_drawn(name, content, {key: np.asarray(tensor) for key, tensor in tensors.items()})


def _can_be_drawn(name: str, content: dict[str, Any], arrays: dict[str, Any]) -> None:
    figure = DRAWINGS[name](content["facts"], arrays)
    assert any(axes.has_data() for axes in figure.axes)
    words = WORDS[name](content["facts"], arrays, content["settings"])
    assert words.keys() == {"title", "caption", "alt"}
    assert "the first 50 test examples" in words["caption"]


def test_the_verb_writes_figures_with_words_and_computes_nothing_twice(enfold, run: Path) -> None:
    asked = (*CLOSENESS, "--only", "similarity", "--json")
    done = enfold("landscape", run, *asked)
    assert done.code == 0, done.err
    assert {part["state"] for part in json.loads(done.out)["parts"].values()} == {"computed"}
    folder = run / "landscape"
    listed = json.loads((folder / "figures.json").read_text())["figures"]
    assert [entry["file"] for entry in listed] == ["similarity.svg"]
    for entry in listed:
        assert (folder / entry["file"]).is_file()
        assert (folder / entry["file"]).with_suffix(".png").is_file()
        assert len(entry["caption"]) > 100
        assert len(entry["alt"]) > 50
    before = (folder / "similarity.safetensors").stat().st_mtime_ns
    again = enfold("landscape", run, *asked)
    assert {part["state"] for part in json.loads(again.out)["parts"].values()} == {"there"}
    assert (folder / "similarity.safetensors").stat().st_mtime_ns == before
    for size in (3, 4):
        finer = study(cell_in(run), folder, Asked(("radial",), examples=50, size=size))
        assert finer["radial"]["state"] == "computed"
        assert load_file(folder / "radial.safetensors")["loss"].shape == (size, size)


def test_what_has_no_time_or_no_trajectory_is_named(enfold, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    shutil.rmtree(run / "trajectory")
    done = enfold("landscape", run, *CLOSENESS, "--minutes", 0, "--out", out, "--only", "map,radial")
    assert done.code == 0, done.err
    assert "trajectory: true" in " ".join(done.out.split())
    assert "raise --minutes" in " ".join(done.out.split())
    assert not list(out.glob("*.safetensors"))
    assert not (run / "landscape").exists()
    found = study(cell_in(run), out, Asked(("similarity",), examples=50))
    assert found["similarity"]["facts"]["cosine_within"] is None, "without a trajectory, members alone are compared"
    assert list(stored_parts(out)) == ["similarity"]


def test_wrong_asks_are_named(enfold, finished: Path) -> None:
    for arguments, says in (
        (("--only", "radiall"), "got 'radiall', did you mean 'radial': choose among them"),
        (("--seed", 7), r"has the seeds \[0\], got 7"),
        (("--examples", 3), "examples must be at least 10, got 3"),
        (("--size", 1), "size must be at least 2, got 1"),
    ):
        done = enfold("landscape", finished, *arguments)
        assert done.code == 2
        assert re.search(says, done.err), done.err
    assert not (finished / "landscape").exists()
