"""Shares in a recipe and by their verb: trained, stored, resumed, scored beside the members."""

import json
from pathlib import Path

import pytest

import enfold as library

SHARES = """
shares:
  - {method: batch_ensemble, label: be, spread: 0.7}
  - {method: swag, label: swag, num_members: 5, start: 0.3}
  - {method: mimo, label: mimo, batch_repetition: 2}
  - {method: tree_net, label: from-member, from_member: true, branches: copies, plan: {epochs: 1}}
  - {method: batch_ensemble, label: narrow, network: {name: mlp, widths: [8]}}
"""


@pytest.fixture
def shares_file(recipe_file: Path) -> Path:
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("folds:")] + SHARES.lstrip())
    return recipe_file


def test_every_share_is_a_row_with_its_diversity(enfold, shares_file, tmp_path):
    out = tmp_path / "out"
    done = enfold("run", shares_file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert list(rows) == [
        "mean member", "ensemble", "ensemble of 2", "ensemble of 3", "be", "swag", "mimo", "from-member", "narrow",
    ]  # fmt: skip
    for label in ("ensemble", "be", "swag", "mimo"):
        assert rows[label]["diversity"]["member_accuracy"]["mean"] > 0.3
        assert rows[label]["diversity"]["disagreement"]["mean"] >= 0
    members = {label: library.load(out / "shares" / f"{label}.safetensors") for label in ("be", "swag", "mimo")}
    assert {label: model.num_members for label, model in members.items()} == {"be": 3, "swag": 5, "mimo": 3}
    assert members["be"].share.spread == 0.7
    assert library.load(out / "shares" / "narrow.safetensors", library.networks.MLP(16, [8], 4)).num_members == 3
    shown = enfold("run", shares_file, out, "--resume")
    assert shown.code == 0, shown.err
    assert "diversity" in shown.out


def test_a_share_can_be_added_to_a_run(enfold, recipe_file, tmp_path):
    out = tmp_path / "out"
    assert enfold("run", recipe_file, out).code == 0
    before = json.loads((out / "summary.json").read_text())["rows"]
    done = enfold("share", out, "mixture-ensembles", "--label", "mix", "--set", "budget=2.0", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert rows["ensemble"]["scores"] == before["ensemble"]["scores"]
    assert rows["mix"]["scores"]["accuracy"]["mean"] > 0.3
    again = enfold("share", out, "mixture-ensembles", "--label", "mix", "--set", "budget=1.5")
    assert again.code == 2
    assert "own label, got 'mix' again, changed" in again.err


def test_a_dry_run_counts_shares(enfold, shares_file, tmp_path):
    done = enfold("run", shares_file, tmp_path / "out", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["trainings"] == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shares: [batch_ensembel]", "no share 'batch_ensembel', did you mean 'batch_ensemble'"),
        ("shares: [{method: batch_ensemble, rnak: 2}]", "no setting 'rnak', did you mean 'rank'"),
        ("shares: [{method: batch_ensemble, num_members: 0}]", "at least 1 member, got 0"),
        ("shares: [batch_ensemble, batch_ensemble]", "its own label, got 'batch_ensemble' twice"),
        ("shares: [{method: batch_ensemble, from_member: warm}]", "'shares.0.from_member' is wrong"),
        ("shares: [{method: batch_ensemble, include: [nowhere]}]", "a pattern must match a layer, but 'nowhere'"),
        ("shares: [{method: mc_dropout}]", "inject"),
        ("shares: [{method: mixture_ensembles, budget: 10}]", "smallest"),
    ],
)
def test_what_is_wrong_is_said_before_training(enfold, recipe_file, tmp_path, line, says):
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("folds:")] + line)
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_members_that_are_one_function_are_told_of(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    same = "shares: [{method: batch_ensemble, label: same, init: ones, bias: shared_post, plan: {order: shared}}]"
    recipe_file.write_text(text[: text.index("folds:")] + same)
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "enfold: same: the 3 members are nearly one function" in done.err
    assert "nearly one function" in json.loads(done.out)["rows"]["same"]["warning"]
