"""`enfold analyse landscape` on a small run: arrays, figures, stored and skipped parts, and refused options."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from browser import CHROMIUM, Browser
from enfold.analysis.diversity_plane import compute_diversity
from enfold.analysis.states import predict_states, sample_indices, select_parameters, unstack_states
from enfold.analysis.trajectory import compute_cosines
from enfold.data.ood import noise
from enfold.errors import EnfoldError
from enfold.metrics import nll
from enfold.metrics.predictions import Predictions
from enfold.report.landscape import DRAWINGS
from enfold.report.landscape_captions import CAPTIONS
from enfold.run import RunDirectory, landscape_parts, parse_recipe
from enfold.run.execute import execute, seed_runs
from enfold.run.landscape import LandscapeOptions, stored_parts, study
from enfold.run.landscape_parts import LANDSCAPE_PARTS, SAMPLED
from enfold.run.seed_run import SeedRun

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

RECIPE = """\
name: small
data: {source: DATA, val_size: 60}
network: {name: mlp, widths: [8]}
members: 3
trajectory: {every: 1}
cost: false
control: false
train: {epochs: 3, batch_size: 64, lr: 0.01}
steps: [batch_ensemble, average]
"""
CLOSENESS = ("--examples", 50, "--size", 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three members with their trajectory, an ensemble step and a merge, on four classes of 4 x 4 images."""
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


def cell_in(run: Path) -> SeedRun:
    opened = RunDirectory.open(run)
    return seed_runs(opened, opened.recipe())[0]


def test_a_recipe_stores_the_trajectory(finished: Path) -> None:
    cell = cell_in(finished)
    assert cell.trajectory().epochs == [0, 1, 2, 3]
    for text, every in (("trajectory: true", 1), ("trajectory: {every: 4}", 4)):
        spec = parse_recipe(text).trajectory
        assert spec is not None
        assert spec.every == every
    assert parse_recipe("trajectory: false").trajectory is None


@pytest.mark.slow
def test_every_part_is_computed_and_drawn(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(landscape_parts, "SUBSETS", 3)  # all of the three members, few of their samples
    cell = cell_in(run)
    found = study(cell, tmp_path / "out", LandscapeOptions(examples=50, size=3))
    assert {name: part["state"] for name, part in found.items()} == dict.fromkeys(LANDSCAPE_PARTS, "computed")
    parts = stored_parts(tmp_path / "out")
    members = cell.members()
    said = predict_states(members.member(0), unstack_states(members), cell.data, examples=50)
    arrays = {name: part[1] for name, part in parts.items()}
    assert arrays["similarity"]["member"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert arrays["similarity"]["epoch"].tolist() == [0, 1, 2, 3] * 3
    accuracy, diversity = compute_diversity(said.member(0), said.subset([1, 2]))
    torch.testing.assert_close(arrays["diversity"]["independent training/accuracy"], accuracy)
    torch.testing.assert_close(arrays["diversity"]["independent training/diversity"], diversity)
    assert len(arrays["diversity"]["ensemble: batch_ensemble/accuracy"]) == 3
    assert float(arrays["sizes"]["original/0/nll"][-1]) == pytest.approx(nll(said))
    for path in ("straight", "matched", "bezier", "tunnel"):
        assert float(arrays["paths"][f"{path}/loss"][0]) == pytest.approx(nll(said.member(0)))
        assert float(arrays["paths"][f"{path}/loss"][-1]) == pytest.approx(nll(said.member(1)))
    assert "ensemble: batch_ensemble/loss" in arrays["paths"]
    stored = cell.run.read_predictions("average")["test"]
    asked = sample_indices(100, 50)
    of_fold = compute_diversity(said.member(0), Predictions(stored.log_probs[:, asked], stored.labels[asked]))
    torch.testing.assert_close(arrays["diversity"]["step: average/diversity"], of_fold[1])
    for kind in SAMPLED:
        within = arrays["sizes"][f"{kind}/within/brier"]
        assert len(within) == 8
        assert float(within[-1]) == pytest.approx(float(arrays["sizes"][f"{kind}/0/brier"][0])), "one mode, all samples"
    assert parts["map"][0]["facts"]["kinds"] == ["training", "averaged", *SAMPLED]
    assert arrays["map"]["kind"].bincount().tolist() == [9, 3, *[24] * len(SAMPLED)], "epochs, means, samples of three"
    assert set(SAMPLED) <= set(parts["diversity"][0]["facts"]["groups"])
    _are_at_odds(arrays["ood"], said, members, cell)
    for name, (content, tensors) in parts.items():
        _can_be_drawn(name, content, {key: np.asarray(tensor) for key, tensor in tensors.items()})


def test_a_network_whose_units_cannot_be_matched_has_the_other_paths(run, tmp_path, monkeypatch) -> None:
    def unknown(*_: Any) -> None:
        raise EnfoldError("nothing may be permuted: use another network")

    monkeypatch.setattr(landscape_parts, "match_to", unknown)
    with pytest.warns(UserWarning, match="the matched path is omitted: nothing may be permuted"):
        study(cell_in(run), tmp_path / "out", LandscapeOptions(only=("paths",), examples=20))
    facts = stored_parts(tmp_path / "out")["paths"][0]["facts"]
    assert facts["paths"] == ["straight", "bezier", "tunnel", "ensemble: batch_ensemble"]


def _are_at_odds(found: dict[str, torch.Tensor], said: Predictions, members: Any, cell: SeedRun) -> None:
    """Jensen-Shannon: the entropy of the mean minus the mean of entropies, on test data and on noise."""
    noisy = cell.data.replace(test=noise("uniform", cell.data, 50, cell.seed))
    sets = {"test data": said, "uniform noise": predict_states(members.member(0), unstack_states(members), noisy)}
    for name, asked in sets.items():
        p = asked.log_probs.exp().double()
        entropies = [-torch.special.xlogy(q, q).sum(-1).mean() for q in (p.mean(0), p)]
        assert float(found[f"independent trainings/{name}"]) == pytest.approx(float(entropies[0] - entropies[1]), 1e-4)
    for kind in ("dropout", "gaussian", "pca"):
        assert 0 <= float(found[f"{kind}/test data"]) < float(found["independent trainings/test data"])
    for kind in ("random", "pca_random"):
        assert float(found[f"{kind}/test data"]) > 0, "as far as 10, which is beyond so small a network's own mode"


def _can_be_drawn(name: str, content: dict[str, Any], arrays: dict[str, Any]) -> None:
    figure = DRAWINGS[name](content["facts"], arrays)
    assert any(axes.has_data() for axes in figure.axes)
    words = CAPTIONS[name](content["facts"], arrays, content["settings"])
    assert words.keys() == {"title", "caption", "alt"}
    assert "up to 50 test examples" in words["caption"]


def test_the_command_writes_figures_and_computes_parts_once(enfold, run: Path) -> None:
    asked = (*CLOSENESS, "--only", "similarity", "--json")
    done = enfold("analyse", "landscape", run, *asked)
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
    again = enfold("analyse", "landscape", run, *asked)
    assert {part["state"] for part in json.loads(again.out)["parts"].values()} == {"stored"}
    assert (folder / "similarity.safetensors").stat().st_mtime_ns == before
    for size in (3, 4):
        finer = study(cell_in(run), folder, LandscapeOptions(("radial",), examples=50, size=size))
        assert finer["radial"]["state"] == "computed"
        assert load_file(folder / "radial.safetensors")["loss"].shape == (size, size)


def test_parts_without_time_or_trajectory_are_skipped_with_a_reason(enfold, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    shutil.rmtree(run / "trajectory")
    done = enfold("analyse", "landscape", run, *CLOSENESS, "--minutes", 0, "--out", out, "--only", "map,radial")
    assert done.code == 0, done.err
    assert "trajectory: true" in " ".join(done.out.split())
    assert "raise --minutes" in " ".join(done.out.split())
    assert not list(out.glob("*.safetensors"))
    assert not (run / "landscape").exists()
    found = study(cell_in(run), out, LandscapeOptions(("similarity",), examples=50))
    facts = found["similarity"]["facts"]
    assert facts["cosine_within"] is None, "without a trajectory, members alone are compared"
    members = cell_in(run).members()
    cosine = compute_cosines([select_parameters(members.member(0), state) for state in unstack_states(members)])
    assert facts["cosine_between"] == pytest.approx(float(cosine[[0, 0, 1], [1, 2, 2]].mean()))
    assert 0 < facts["disagreement_between"] < 1
    assert list(stored_parts(out)) == ["similarity"]


def test_new_models_recompute_the_parts_that_show_them(run: Path) -> None:
    asked, out = LandscapeOptions(("diversity", "similarity"), examples=50), run / "landscape"
    said = run / "predictions/average.safetensors"
    said.rename(run / "kept")
    assert {part["state"] for part in study(cell_in(run), out, asked).values()} == {"computed"}
    (run / "kept").rename(said)
    found = study(cell_in(run), out, asked)
    assert {name: part["state"] for name, part in found.items()} == {"diversity": "computed", "similarity": "stored"}
    assert "step: average" in found["diversity"]["facts"]["groups"]


@pytest.mark.parametrize(
    ("file", "text"),
    [("similarity.safetensors", "damaged"), ("similarity.json", "{}"), ("similarity.json", "[1]")],
)
def test_a_damaged_part_is_an_error(enfold, run: Path, file: str, text: str) -> None:
    study(cell_in(run), run / "landscape", LandscapeOptions(("similarity",), examples=50))
    (run / "landscape" / file).write_text(text)
    done = enfold("analyse", "landscape", run, *CLOSENESS, "--only", "similarity")
    assert done.code == 2
    assert "'similarity' cannot be read" in " ".join(done.err.split())
    assert "delete similarity.json there" in " ".join(done.err.split())


def test_a_failing_part_is_skipped_with_a_reason(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(landscape_parts, "accuracy", lambda said: 1.0)  # a base network that never errs
    found = study(cell_in(run), run / "landscape", LandscapeOptions(("diversity", "similarity"), examples=50))
    assert {name: part["state"] for name, part in found.items()} == {"diversity": "skipped", "similarity": "computed"}
    assert "base_accuracy" in found["diversity"]["reason"]
    assert list(stored_parts(run / "landscape")) == ["similarity"]


def test_parts_of_an_older_format_are_recomputed(run: Path) -> None:
    asked, folder = LandscapeOptions(("similarity",), examples=50), run / "landscape"
    study(cell_in(run), folder, asked)
    content = json.loads((folder / "similarity.json").read_text())
    content["settings"]["format"] -= 1
    (folder / "similarity.json").write_text(json.dumps(content))
    assert stored_parts(folder) == {}
    assert study(cell_in(run), folder, asked)["similarity"]["state"] == "computed"


def test_parts_of_other_members_are_recomputed(run: Path, tmp_path: Path) -> None:
    """As of another run, whose folder was the same."""
    asked = LandscapeOptions(only=("similarity",), examples=50)
    assert study(cell_in(run), tmp_path / "out", asked)["similarity"]["state"] == "computed"
    assert study(cell_in(run), tmp_path / "out", asked)["similarity"]["state"] == "stored"
    cell = cell_in(run)
    vars(cell)["members_digest"] = "0" * 64
    assert study(cell, tmp_path / "out", asked)["similarity"]["state"] == "computed"


def test_parts_with_samples_are_recomputed_for_new_kinds(run: Path, monkeypatch) -> None:
    asked, folder = LandscapeOptions(("diversity", "similarity"), examples=50), run / "landscape"
    monkeypatch.setattr(landscape_parts, "SAMPLED", SAMPLED[:-1])
    study(cell_in(run), folder, asked)
    monkeypatch.undo()
    found = study(cell_in(run), folder, asked)
    assert {name: part["state"] for name, part in found.items()} == {"diversity": "computed", "similarity": "stored"}
    assert "pca_random" in found["diversity"]["facts"]["groups"]


@pytest.mark.slow
def test_landscape_and_alignment_are_on_one_page(enfold, run: Path) -> None:
    """Real figures of both in a browser: each in its section, with captions and without external requests."""
    done = enfold("analyse", "landscape", run, *CLOSENESS)
    assert done.code == 0, done.err
    few = ("--epochs", 1, "--temperatures", "1,5", "--noises", "0,1", "--points", 3)
    done = enfold("analyse", "alignment", run, *few)
    assert done.code == 0, done.err
    assert enfold("report", run).code == 0
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    browser = Browser()
    try:
        for width in (400, 1400):
            browser.size(width, 900)
            browser.open((run / "report.html").as_uri())
            assert browser.ask("document.documentElement.scrollWidth") <= width
        for section, count in (("landscape", len(LANDSCAPE_PARTS)), ("alignment", 8)):
            figures = browser.ask(
                f"[...document.querySelectorAll('#{section} figure')].map(f => [f.querySelector('figcaption')"
                ".textContent.length, f.querySelector('svg[role=img]').ariaLabel.length, "
                "f.querySelector('svg').getBoundingClientRect().height])"
            )
            assert len(figures) == count
            assert all(caption > 100 and alt > 50 and height > 100 for caption, alt, height in figures), figures
        assert browser.complaints == []
        assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []
    finally:
        browser.close()


def test_invalid_options_are_refused(enfold, finished: Path) -> None:
    for arguments, says in (
        (("--only", "radiall"), "got 'radiall', did you mean 'radial': choose among them"),
        (("--seed", 7), "must be one of the run's seeds, 0, got 7"),
        (("--examples", 3), "examples must be at least 10, got 3"),
        (("--size", 1), "size must be at least 2, got 1"),
    ):
        done = enfold("analyse", "landscape", finished, *arguments)
        assert done.code == 2
        assert re.search(says, done.err), done.err
    assert not (finished / "landscape").exists()
