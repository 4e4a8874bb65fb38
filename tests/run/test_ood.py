"""Sets from outside in a run: refused before anything is written, scored once, stored and summarised."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from enfold.data.corruptions import cifar_c
from enfold.errors import EnfoldError
from enfold.run.collect import collect
from enfold.run.recipe import parse_recipe
from enfold.run.results import _spread_tree

OOD = """
ood:
  - {source: OTHER, label: other, examples: 40}
  - {noise: uniform, examples: 30}
  - {classes: [3]}
"""


@pytest.fixture
def other(tmp_path):
    images = np.random.default_rng(1).integers(0, 255, size=(90, 6, 6, 3)).astype(np.uint8)
    path = tmp_path / "other.npz"
    np.savez(path, x_train=images[:40], y_train=np.arange(40) % 2, x_test=images[40:], y_test=np.arange(50) % 2)
    return path


@pytest.fixture
def recipe(recipe_file, other):
    text = recipe_file.read_text().replace("val_size: 60", "val_size: 60, exclude_classes: [3]")
    text = text.replace("members: 3\nsizes: [2, 3]", "members: 2\nseeds: [0, 1]").replace("epochs: 3", "epochs: 1")
    recipe_file.write_text(text + OOD.replace("OTHER", str(other)))
    return recipe_file


def test_a_run_evaluates_its_ood_sets_and_stores_scores(enfold, recipe, tmp_path, monkeypatch):
    out = tmp_path / "run"
    done = enfold("run", recipe, out)
    assert done.code == 0, done.err
    assert "enfold: other: 40 out-of-distribution images; resized from 6 x 6 to 4 x 4 by bilinear" in done.err
    rows = json.loads((out / "summary.json").read_text())["rows"]
    found = rows["ensemble"]["ood"]
    assert list(found) == ["other", "uniform noise", "classes 3"]
    assert found["other"]["examples"] == 40
    assert found["other"]["adapted"].startswith(
        "resized from 6 x 6 to 4 x 4 by bilinear interpolation; colour converted"
    )
    assert len(found["classes 3"]["scores"]["epkl"]["auroc"]["values"]) == 2
    assert "epkl" not in rows["average"]["ood"]["other"]["scores"]
    assert "energy" in rows["mean member"]["ood"]["other"]["scores"]

    stored = json.loads((out / "seed-0" / "ood.json").read_text())
    scores = load_file(out / "seed-0" / "ood" / "ensemble.safetensors")
    assert len(scores["inside/entropy"]) > len(scores["other/entropy"]) == 40
    # computed once: what is stored is taken as it is
    stored["rows"]["average"]["other"]["entropy"]["auroc"] = 0.123
    (out / "seed-0" / "ood.json").write_text(json.dumps(stored))
    assert enfold("run", recipe, out, "--resume").code == 0
    again = json.loads((out / "seed-0" / "results.json").read_text())["rows"]
    assert again["average"]["ood"]["other"]["scores"]["entropy"]["auroc"] == 0.123

    for label in ("mean member", "ensemble", "average"):
        assert 0 <= rows[label]["selective"]["aurc"]["mean"] <= 1
        assert set(rows[label]["uncertainty"]["kept"]) >= {"entropy", "mutual_information"}
    assert rows["ensemble"]["uncertainty"]["kept"]["entropy"]["pearson"]["mean"] == pytest.approx(1)
    assert rows["ensemble"]["uncertainty"]["epistemic"]["mean"] > 0
    assert "epistemic" not in rows["average"]["uncertainty"]

    assert collect(out).examples.notice == "", "the data without the class left out are those of the run"
    monkeypatch.setattr(
        "enfold.report.uncertainty_blocks.write_figure", lambda make, folder, name, *_: [folder / name] * 2
    )
    drawn = enfold("evaluate", out, "--figures")
    assert drawn.code == 0, drawn.err
    files = {entry["file"] for entry in json.loads((out / "figures/figures.json").read_text())["figures"]}
    assert files >= {"reliability-ensemble.svg", "risk-coverage.svg", "ood-other.svg", "roc-classes-3.svg"}
    assert f"{len(files)} figures as .svg and .png written to {out / 'figures'}" in drawn.err


@pytest.mark.slow
def test_all_rows_use_the_same_images(enfold, recipe, other, tmp_path):
    """A file that changes before a step is added: stored scores of the old file are not shown."""
    recipe.write_text(recipe.read_text().replace("seeds: [0, 1]", "seeds: [0]"))
    out = tmp_path / "run"
    assert enfold("run", recipe, out).code == 0
    before = json.loads((out / "ood.json").read_text())["rows"]
    arrays = dict(np.load(other))
    np.savez(other, **{**arrays, "x_test": 255 - arrays["x_test"][::-1]})
    assert enfold("merge", out, "average", "--label", "more").code == 0
    after = json.loads((out / "ood.json").read_text())["rows"]
    assert after["average"] == after["more"]
    assert after["average"]["other"] != before["average"]["other"]
    assert after["average"]["uniform noise"] == before["average"]["uniform noise"]


def test_what_cannot_be_adapted_is_refused_before_anything_is_written(enfold, recipe, other, tmp_path):
    np.savez(other, x_train=np.zeros((20, 7)), y_train=np.arange(20) % 2, x_test=np.ones((9, 7)), y_test=[0] * 9)
    out = tmp_path / "run"
    done = enfold("run", recipe, out)
    assert done.code != 0
    assert "images must have shape" in done.err
    assert not out.exists()


@pytest.fixture
def official(tmp_path, monkeypatch):
    """A run's recipe about 100 test images of 32 x 32, and a folder of them as the official files are, one kind."""
    monkeypatch.setattr(cifar_c, "IMAGES", 100)
    rng = np.random.default_rng(0)
    labels, images = np.arange(400) % 10, rng.integers(0, 255, size=(400, 32, 32, 3)).astype(np.uint8)
    np.savez(
        tmp_path / "cifar.npz", x_train=images[100:], y_train=labels[100:], x_test=images[:100], y_test=labels[:100]
    )
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "fog.npy", np.concatenate([images[:100] // (severity + 1) for severity in range(5)]))
    np.save(folder / "labels.npy", np.tile(labels[:100], 5).astype(np.uint8))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {{source: {tmp_path / 'cifar.npz'}, val_size: 100}}\nnetwork: {{name: mlp, widths: [4]}}\n"
        f"members: 2\ncost: false\ntrain: {{epochs: 1}}\n"
        f"corruptions: {{folder: {folder}, kinds: [fog], severities: [1, 5]}}\n"
    )
    return recipe


def test_official_files_are_scored_under_their_own_name(enfold, official, tmp_path):
    done = enfold("run", official, tmp_path / "run")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "run/summary.json").read_text())["rows"]
    assert rows["ensemble"]["corrupted"]["source"] == "CIFAR-10-C"
    assert "accuracy, CIFAR-10-C (%)" in (tmp_path / "run/table.md").read_text()
    stored = json.loads((tmp_path / "run/corrupted.json").read_text())
    clean, darker = (rows["ensemble"]["scores"]["nll"]["mean"], stored["rows"]["ensemble"]["fog"]["5"]["nll"])
    assert stored["rows"]["ensemble"]["fog"]["1"]["nll"] == pytest.approx(clean)  # here severity 1 changes nothing
    assert darker != pytest.approx(clean)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kinds: [fog]", "kinds: [fog, snow]", "snow.npy must exist"),
        ("val_size: 100", "val_size: 100, exclude_classes: [3]", "CIFAR-10-C contains the test images of CIFAR-10 in"),
    ],
)
def test_official_files_must_exist_and_match_the_data(enfold, official, tmp_path, old, new, message):
    official.write_text(official.read_text().replace(old, new))
    done = enfold("run", official, tmp_path / "run")
    assert done.code != 0
    assert message in done.err
    assert not (tmp_path / "run").exists()


def test_the_validation_split_must_differ_from_the_test_split(enfold, tmp_path, recipe_file):
    module = tmp_path / "own.py"
    module.write_text(
        "import torch\nfrom enfold.data import Data, Split\n"
        "part = Split(torch.rand(40, 16), torch.arange(40) % 4)\n"
        "def made():\n    return Data(part, part, part, 4, (16,))\n"
    )
    recipe_file.write_text("data: {source: '" + str(module) + ":made'}\nnetwork: {name: mlp, widths: [4]}\n")
    done = enfold("run", recipe_file, tmp_path / "run", "--trust-code")
    assert done.code != 0
    assert "selected on the validation split and evaluated on the test split, got the same examples in both" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ood: [{}]", "must have one of source, noise and classes, got none"),
        ("ood: [{noise: uniform, source: mnist}]", "got source, noise"),
        ("ood: [{noise: white}]", "one of 'uniform', 'gaussian'"),
        ("ood: [mnist, mnist]", "its own name, got 'mnist' twice"),
        ("data: mnist\nood: [mnist]", "another source than the data's own, got 'mnist'"),
        ("ood: [{classes: [3]}]", "among those of data.exclude_classes, got 3"),
        ("ood: [{noise: uniform, label: inside}]", "'inside' is the name of the test split"),
        ("ood: [{noise: uniform, examples: 0}]", "greater than or equal to 1"),
        ("ood: [{nois: uniform}]", "no key 'nois'"),
    ],
)
def test_wrong_sets_are_refused_with_the_rule(text, message):
    with pytest.raises(EnfoldError, match=message):
        parse_recipe(text)


def test_ood_sources_by_name_and_by_user_code():
    recipe = parse_recipe("ood: [mnist, {source: 'own.py:made'}]")
    assert [each.name for each in recipe.ood] == ["mnist", "own.py:made"]
    assert recipe.code_references() == ["own.py:made"]
    assert recipe.extends(parse_recipe("name: run"))


def test_standard_deviations_preserve_words_and_counts():
    found = _spread_tree([{"a": "told", "n": 3, "x": {"y": 1.0}, "mce": 0.9}, {"a": "told", "n": 3, "x": {"y": 3.0}}])
    assert "mce" not in found  # a seed without errors to divide by has none
    assert found["a"] == "told"
    assert found["n"] == 3
    assert found["x"]["y"]["mean"] == 2.0
