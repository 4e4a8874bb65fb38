"""Sets from outside in a run: refused before anything is written, scored once, stored and summarised."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from enfold.errors import EnfoldError
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
    text = recipe_file.read_text().replace("validation: 60", "validation: 60, exclude_classes: [3]")
    text = text.replace("members: 3\nsizes: [2, 3]", "members: 2\nseeds: [0, 1]").replace("epochs: 3", "epochs: 1")
    recipe_file.write_text(text + OOD.replace("OTHER", str(other)))
    return recipe_file


def test_a_run_scores_its_sets_and_keeps_what_it_scored(enfold, recipe, tmp_path):
    out = tmp_path / "run"
    done = enfold("run", recipe, out)
    assert done.code == 0, done.err
    rows = json.loads((out / "summary.json").read_text())["rows"]
    found = rows["ensemble"]["ood"]
    assert list(found) == ["other", "uniform noise", "classes 3"]
    assert found["other"]["examples"] == 40
    assert found["other"]["adapted"].startswith("resized from 6 x 6 to 4 x 4 by bilinear interpolation; colour made")
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


def test_what_cannot_be_adapted_is_refused_before_anything_is_written(enfold, recipe, other, tmp_path):
    np.savez(other, x_train=np.zeros((20, 7)), y_train=np.arange(20) % 2, x_test=np.ones((9, 7)), y_test=[0] * 9)
    out = tmp_path / "run"
    done = enfold("run", recipe, out)
    assert done.code != 0
    assert "a set from outside must hold grey or colour images" in done.err
    assert not out.exists()


def test_the_test_part_is_no_validation_part(enfold, tmp_path, recipe_file):
    module = tmp_path / "own.py"
    module.write_text(
        "import torch\nfrom enfold.data import Data, Split\n"
        "part = Split(torch.rand(40, 16), torch.arange(40) % 4)\n"
        "def made():\n    return Data(part, part, part, 4, (16,))\n"
    )
    recipe_file.write_text("data: {source: '" + str(module) + ":made'}\nnetwork: {name: mlp, widths: [4]}\n")
    done = enfold("run", recipe_file, tmp_path / "run", "--trust-code")
    assert done.code != 0
    assert "calibrated on the validation part and judged by the test part, got the same examples in both" in done.err
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
        ("ood: [{noise: uniform, label: inside}]", "'inside' is the name of the test part"),
        ("ood: [{noise: uniform, examples: 0}]", "greater than or equal to 1"),
        ("ood: [{nois: uniform}]", "no key 'nois'"),
    ],
)
def test_wrong_sets_are_refused_with_the_rule(text, message):
    with pytest.raises(EnfoldError, match=message):
        parse_recipe(text)


def test_a_source_by_name_is_a_set_and_code_of_ones_own_is_known():
    recipe = parse_recipe("ood: [mnist, {source: 'own.py:made'}]")
    assert [each.name for each in recipe.ood] == ["mnist", "own.py:made"]
    assert recipe.runs_code() == ["own.py:made"]
    assert recipe.extends(parse_recipe("name: run"))


def test_spreads_keep_words_and_counts():
    found = _spread_tree([{"a": "told", "n": 3, "x": {"y": 1.0}}, {"a": "told", "n": 3, "x": {"y": 3.0}}])
    assert found["a"] == "told"
    assert found["n"] == 3
    assert found["x"]["y"]["mean"] == 2.0
