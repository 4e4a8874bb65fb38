"""Ensemble steps of a recipe and of `enfold train`: trained, stored, resumed, evaluated beside the members."""

import json
from itertools import count
from pathlib import Path

import pytest

import enfold as library

STEPS = """
steps:
  - {method: batch_ensemble, label: be, spread: 0.7}
  - {method: swag, label: swag, num_members: 5, start: 0.3}
  - {method: mimo, label: mimo, batch_repetition: 2}
  - {method: tree_net, label: from-member, network: best_member, branches: copies, train: {epochs: 1}}
  - {method: batch_ensemble, label: narrow, network: {name: mlp, widths: [8]}}
"""


@pytest.fixture
def steps_file(recipe_file: Path) -> Path:
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + STEPS.lstrip())
    return recipe_file


@pytest.mark.slow
def test_every_ensemble_is_a_row_with_its_diversity(enfold, steps_file, tmp_path):
    out = tmp_path / "out"
    done = enfold("run", steps_file, out, "--json")
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
    assert members["be"].spread == 0.7
    assert library.load(out / "steps" / "narrow.safetensors", library.networks.MLP(16, [8], 4)).num_members == 3
    shown = enfold("run", steps_file, out, "--resume")
    assert shown.code == 0, shown.err
    assert "diversity" in shown.out


def test_an_ensemble_can_be_added_to_a_run(enfold, finished):
    out = finished
    before = json.loads((out / "summary.json").read_text())["rows"]
    done = enfold("train", out, "mixture-ensemble", "--label", "mix", "--set", "budget=2.0", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert rows["ensemble"]["scores"] == before["ensemble"]["scores"]
    assert rows["mix"]["scores"]["accuracy"]["mean"] > 0.3
    again = enfold("train", out, "mixture-ensemble", "--label", "mix", "--set", "budget=1.5")
    assert again.code == 2
    assert "got 'mix' with other options, and the run has average, distill-fresh, mix: add --label mix-2\n" in again.err


def test_a_dry_run_counts_ensembles(enfold, steps_file, tmp_path):
    done = enfold("run", steps_file, tmp_path / "out", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["trainings"] == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("steps: [batch_ensembel]", "no method 'batch_ensembel', did you mean 'batch_ensemble'"),
        ("steps: [{method: batch_ensemble, rnak: 2}]", "no option 'rnak', did you mean 'rank'"),
        ("steps: [{method: batch_ensemble, num_members: 0}]", "num_members must be"),
        ("steps: [batch_ensemble, batch_ensemble]", "its own label, got 'batch_ensemble' twice"),
        ("steps: [{method: batch_ensemble, network: nowhere}]", "nowhere"),
        (
            "steps: [{method: batch_ensemble, include: [nowhere]}]",
            "include and exclude must match layers, but 'nowhere'",
        ),
        ("steps: [{method: mc_dropout}]", "inject"),
        ("steps: [{method: mixture_ensemble, budget: 10}]", "smallest"),
    ],
)
def test_invalid_options_are_reported_before_training(enfold, recipe_file, tmp_path, line, says):
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + line)
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_members_that_are_one_function_give_a_warning(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    same = "steps: [{method: batch_ensemble, label: same, init: ones, bias: shared_post, train: {order: shared}}]"
    recipe_file.write_text(text[: text.index("steps:")] + same)
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "enfold: same: " in done.err
    assert "nearly identical" in json.loads(done.out)["rows"]["same"]["warning"]


def test_a_method_of_another_kind_names_its_command(enfold, finished):
    for verb, method, use in (
        ("train", "kd", "enfold distill RUN kd"),
        ("train", "one-to-one", "enfold distill RUN one_to_one"),
        ("merge", "batch-ensemble", "enfold train RUN batch_ensemble"),
        ("distill", "soup", "enfold merge RUN soup"),
        ("merge", "mixup", "perturb: mixup"),
    ):
        refused = enfold(verb, finished, method)
        assert (refused.code, use in refused.err) == (2, True), refused.err
    assert "hydra_ensemble" in enfold("train", finished, "hydra").err, "a similar name of the kind"


def test_a_method_that_adapts_a_trained_network_warns_about_an_untrained_one(enfold, recipe_file, tmp_path):
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
    assert "adapts a trained network, but this one is untrained: use network: best_member" in rows["fresh"]["warning"]
    assert "best_member" not in rows["adapted"].get("warning", "")
    assert "enfold: fresh: lora_ensemble adapts" in done.err


def test_a_search_with_fewer_networks_has_a_note(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    search = "{method: hyper_deep_ensemble, label: few, candidates: 4, stratify: false, goal: accuracy}"
    recipe_file.write_text(text[: text.index("steps:")] + f"steps: [{search}]")
    done = enfold("run", recipe_file, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "instead of 3" in json.loads(done.out)["rows"]["few"]["warning"]


@pytest.mark.slow
def test_the_cost_of_a_new_model_is_measured_with_one_network(enfold, costed, monkeypatch):
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


def test_help_shows_how_many_members_an_ensemble_has(enfold):
    shown = " ".join(enfold("train", "--help").out.replace("│", " ").split())
    assert "as many members as the run, except for methods with a published number" in shown
    assert "in a run it stays this number" in enfold("methods", "swag", "--json").out
    assert "in a run, the run's number of members" in enfold("methods", "batch-ensemble", "--json").out
