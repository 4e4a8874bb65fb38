"""Shares in a recipe and by their verb: trained, stored, resumed, scored beside the members."""

import json
from itertools import count
from pathlib import Path

import pytest

import enfold as library
from enfold.registry import methods, related

SHARES = """
steps:
  - {method: batch_ensemble, label: be, spread: 0.7}
  - {method: swag, label: swag, num_members: 5, start: 0.3}
  - {method: mimo, label: mimo, batch_repetition: 2}
  - {method: tree_net, label: from-member, network: best_member, branches: copies, train: {epochs: 1}}
  - {method: batch_ensemble, label: narrow, network: {name: mlp, widths: [8]}}
"""


@pytest.fixture
def shares_file(recipe_file: Path) -> Path:
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + SHARES.lstrip())
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
    members = {label: library.load(out / "steps" / f"{label}.safetensors") for label in ("be", "swag", "mimo")}
    assert {label: model.num_members for label, model in members.items()} == {"be": 3, "swag": 5, "mimo": 3}
    assert members["be"].share.spread == 0.7
    assert library.load(out / "steps" / "narrow.safetensors", library.networks.MLP(16, [8], 4)).num_members == 3
    shown = enfold("run", shares_file, out, "--resume")
    assert shown.code == 0, shown.err
    assert "diversity" in shown.out


def test_a_share_can_be_added_to_a_run(enfold, finished):
    out = finished
    before = json.loads((out / "summary.json").read_text())["rows"]
    done = enfold("train", out, "mixture-ensemble", "--label", "mix", "--set", "budget=2.0", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert rows["ensemble"]["scores"] == before["ensemble"]["scores"]
    assert rows["mix"]["scores"]["accuracy"]["mean"] > 0.3
    again = enfold("train", out, "mixture-ensemble", "--label", "mix", "--set", "budget=1.5")
    assert again.code == 2
    assert "own label, got 'mix' again, changed, beside mix, average, distill-fresh: add --label mix-2\n" in again.err


def test_a_dry_run_counts_shares(enfold, shares_file, tmp_path):
    done = enfold("run", shares_file, tmp_path / "out", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["trainings"] == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("steps: [batch_ensembel]", "no share 'batch_ensembel', did you mean 'batch_ensemble'"),
        ("steps: [{method: batch_ensemble, rnak: 2}]", "no setting 'rnak', did you mean 'rank'"),
        ("steps: [{method: batch_ensemble, num_members: 0}]", "at least 1 member, got 0"),
        ("steps: [batch_ensemble, batch_ensemble]", "its own label, got 'batch_ensemble' twice"),
        (
            "steps: [{method: batch_ensemble, from_member: warm}]",
            "'from_member' of share 'batch_ensemble' must be true or false",
        ),
        ("steps: [{method: batch_ensemble, include: [nowhere]}]", "a pattern must match a layer, but 'nowhere'"),
        ("steps: [{method: mc_dropout}]", "inject"),
        ("steps: [{method: mixture_ensemble, budget: 10}]", "smallest"),
    ],
)
def test_what_is_wrong_is_said_before_training(enfold, recipe_file, tmp_path, line, says):
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + line)
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_members_that_are_one_function_are_told_of(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    same = "steps: [{method: batch_ensemble, label: same, init: ones, bias: shared_post, train: {order: shared}}]"
    recipe_file.write_text(text[: text.index("steps:")] + same)
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "enfold: same: the 3 members are nearly one function" in done.err
    assert "nearly one function" in json.loads(done.out)["rows"]["same"]["warning"]


def test_a_method_of_the_other_kind_is_told_its_verb(enfold, finished):
    out = finished
    refused = enfold("train", out, "kd")
    assert (refused.code, "'kd' is a fold: use enfold fold RUN kd" in refused.err) == (2, True)
    refused = enfold("fold", out, "multi-head")
    assert "folds near to it are hydra, one_to_one\n" in refused.err
    refused = enfold("train", out, "one-to-one")
    assert "'one_to_one' is a fold: use enfold fold RUN" in refused.err
    assert related("hydra_distillation", methods("share")) == ["hydra"]
    assert related("hydra", methods("fold")) == ["hydra", "one_to_one"]
    refused = enfold("fold", out, "batch-ensemble")
    assert (refused.code, "'batch_ensemble' is a share: use enfold share RUN" in refused.err) == (2, True)


def test_a_share_that_adapts_a_trained_network_is_told_where_it_starts_anew(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    lora = "{method: lora_ensemble, label: LABEL, rank: 2, train: {epochs: 1}MORE}"
    fresh, adapted = (
        lora.replace("LABEL", label).replace("MORE", more)
        for label, more in (("fresh", ""), ("adapted", ", network: best_member"))
    )
    recipe_file.write_text(text[: text.index("steps:")] + f"steps: [{fresh}, {adapted}]")
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert "adapts a trained network, but this one was drawn anew: use network: best_member" in rows["fresh"]["warning"]
    assert "from_member" not in rows["adapted"].get("warning", "")
    assert "enfold: fresh: lora_ensemble adapts" in done.err


def test_a_search_that_picks_fewer_networks_says_so_in_its_row(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    search = "{method: hyper_deep_ensemble, label: few, candidates: 4, stratify: false, goal: accuracy}"
    recipe_file.write_text(text[: text.index("steps:")] + f"steps: [{search}]")
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "not the 3 asked for" in json.loads(done.out)["rows"]["few"]["warning"]


def test_cost_is_measured_of_what_is_new_beside_one_network(enfold, costed, monkeypatch):
    out, ticks = costed, count()
    before = json.loads((out / "cost.json").read_text())
    monkeypatch.setattr("enfold.cost._synchronised_clock", lambda: 0.006 * next(ticks))  # another day, a slower machine
    assert enfold("train", out, "batch-ensemble").code == 0
    after = json.loads((out / "cost.json").read_text())
    assert {label: after[label] for label in before} == before
    added = after["batch-ensemble"]
    assert after.keys() - before.keys() == {"batch-ensemble"}
    for batch in ("1", "128"):
        assert before["mean member"]["latency"][batch]["median"] == pytest.approx(0.004)
        assert added["reference"]["latency"][batch]["median"] == pytest.approx(0.006), "measured beside it, once more"
        assert added["ratios"]["latency"][batch] == pytest.approx(1)


def test_help_says_how_many_members_a_share_has(enfold):
    said = " ".join(enfold("share", "--help").out.replace("│", " ").split())
    assert "as many members as the run, but for methods with a number of their own" in said
    assert "a number of the method's own" in enfold("methods", "swag").out
    assert "in a run, as many as the run has" in enfold("methods", "batch-ensemble").out
