"""Distillations in a recipe and by their verb: students of all kinds, stored, resumed, refused before anything runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import enfold as library
from enfold.report.headline import headline
from enfold.report.table import notes
from enfold.run.collect import collect

FOLDS = """
steps:
  - {method: latent_be, label: latent, perturb: tdiv_sdiv}
  - {method: kd, label: into-share, init: random, share: {method: batch_ensemble, num_members: 2}}
  - {method: one_to_one, label: heads, share: batch_ensemble, start: average, tie: 0.1}
  - {method: proxy_end2, label: proxy, init: random}
  - {method: kd, label: small, student: {name: mlp, widths: [8]}, perturb: {method: conf_ods, step: 2}}
  - {method: hydra, label: hydra, first_epochs: 1}
"""


def with_folds(recipe_file: Path, steps: str) -> Path:
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + folds.lstrip())
    return recipe_file


def test_every_student_is_a_row(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_folds(recipe_file, FOLDS)
    done = enfold("run", file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    labels = ["latent", "into-share", "heads", "proxy", "small", "hydra"]
    assert [row for row in rows if row in labels] == labels
    for label in (*labels, "control"):
        assert f"seed 0: {label} 100 %" in done.err
    assert all(rows[label]["scores"]["accuracy"]["mean"] > 0.3 for label in labels)
    assert {label for label in labels if "diversity" in rows[label]} == {"into-share", "heads", "hydra"}
    make = library.networks.MLP(16, [16], 4)
    kinds = {label: library.load(out / "steps" / f"{label}.safetensors", make) for label in ("latent", "heads")}
    assert type(kinds["latent"]) is library.networks.MLP
    assert kinds["heads"].num_members == 3
    assert type(library.load(out / "steps" / "proxy.safetensors")) is library.networks.MLP
    answers = list((out / "answers").iterdir())
    assert len(answers) == 1  # asked once for all that move nothing
    before = {path: path.read_bytes() for path in (out / "steps").iterdir()}
    again = enfold("run", file, out, "--resume", "--json")
    assert json.loads(again.out)["rows"] == rows
    assert {path: path.read_bytes() for path in (out / "steps").iterdir()} == before


def test_a_dirichlet_student_is_evaluated_by_its_mean(enfold, finished, tmp_path):
    out = finished
    done = enfold("distill", out, "proxy-end2", "--label", "proxy", "--json")
    assert done.code == 0, done.err
    network = library.load(out / "steps" / "proxy.safetensors")
    assert json.loads((out / "steps" / "proxy.json").read_text())["about"]["dirichlet_offset"] == 1.0
    recipe = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    expected = library.evaluate(library.Dirichlet(network, 1.0), recipe).scores["nll"]
    found = json.loads(done.out)["rows"]["proxy"]["scores"]["nll"]["mean"]
    assert found == pytest.approx(expected)
    assert found != pytest.approx(library.evaluate(network, recipe).scores["nll"])


@pytest.mark.parametrize(
    ("fold", "says"),
    [
        (
            "{method: one_to_one, label: a, share: {method: batch_ensemble, num_members: 2}}",
            "3 teachers and 2 students",
        ),
        ("{method: kd, label: a, perturb: tdiv_sdiv}", "one network as the student"),
        ("{method: kd, label: a, perturb: wobble}", "there is no perturb 'wobble'"),
        ("{method: kd, label: a, start: als}", "a BatchEnsemble's, got one network"),
        ("{method: kd, label: a, alpha: 2}", r"alpha must be in [0, 1], got 2"),
        ("{method: kd, label: a, temperature: 0}", "temperature must be above 0, got 0"),
        ("{method: kd, label: a, temperature: warm}", "'temperature' of fold 'a' must be a number, got 'warm'"),
        ("{method: kd, label: a, share: {num_members: 2}}", "a name, or a mapping with method"),
        ("{method: kd, label: a, share: {method: batch_ensemble, members: 8}}", "no setting 'members'"),
        ("{method: kd, label: a, student: {name: mlp, widths: wide}}", "widths"),
        ("{method: kd, label: a, student: mlp}", "got start: member: use init: random"),
        ("{method: ae_kd, label: a, tolerance: 0.1}", "tolerance"),
        ("{method: latent_be, label: a, share: batch_ensemble}", "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(enfold, recipe_file, tmp_path, fold, says):
    done = enfold("run", with_folds(recipe_file, f"steps:\n  - {fold}\n"), tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_corrupted_copies_are_scored_beside_the_clean(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text().replace("cost: false", "cost: false\nCORRUPTED")
    for spec, says in (("{severities: [6]}", "6"), ("{kinds: [rain]}", "rain"), ("{kinds: [fog]}", "8 pixels")):
        recipe_file.write_text(text.replace("CORRUPTED", f"corruptions: {spec}"))
        done = enfold("run", recipe_file, tmp_path / "none")  # the last one because pictures are 4 x 4
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert says in done.err
        assert not (tmp_path / "none").exists()
    stored = np.load(tmp_path / "small.npz")
    larger = {key: np.kron(stored[key], np.ones((1, 1, 3, 3), np.uint8)) for key in ("x_train", "x_test")}
    np.savez(tmp_path / "small.npz", **larger, y_train=stored["y_train"], y_test=stored["y_test"])
    recipe_file.write_text(
        text.replace("CORRUPTED", "corruptions: {kinds: [contrast], severities: [1, 5], examples: 50}")
    )
    out = tmp_path / "out"
    done = enfold("run", recipe_file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    by_kind = json.loads((out / "corrupted.json").read_text())["rows"]
    for label in ("mean member", "ensemble", "average", "distill-fresh"):
        cells = by_kind[label]["contrast"]
        mean = (cells["1"]["nll"] + cells["5"]["nll"]) / 2
        assert rows[label]["corrupted"]["nll"]["mean"] == pytest.approx(mean)
    assert "corrupted" in enfold("run", recipe_file, out, "--resume").out


ROUTES = """
steps:
  - {method: average, label: of-two, first: 2}
  - {method: weight_matching, label: route, first: 2, then: [repair, {method: kd, train: {epochs: 2}}]}
  - {method: perm_avg, label: soft, first: 2, train: {epochs: 1}}
"""


def test_a_route_and_a_fold_of_some_members_are_rows(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_folds(recipe_file, ROUTES)
    done = enfold("run", file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert {"of-two", "route", "soft", "control", "control-2"} <= set(rows)
    data = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    members = library.load(out / "members" / "members.safetensors", library.networks.MLP(16, [16], 4))
    of_two = library.load(out / "steps" / "of-two.safetensors")
    expected = library.Average()(members[:2], data).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in of_two.state_dict().items())
    told = json.loads((out / "steps" / "route.json").read_text())["about"]["then"]
    assert told == [{"method": "repair"}, {"method": "kd", "plan": {"epochs": 2}}]
    assert rows["ensemble of 2"]["gain_recovered"]["mean"] != pytest.approx(1)  # of what all three gain
    assert rows["route"]["scores"]["accuracy"]["mean"] > 0.8


def test_what_the_names_of_rows_do_not_say_is_said_below_the_table(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_folds(recipe_file, ROUTES)
    file.write_text(file.read_text().replace("sizes: [2, 3]", "sizes: [3]"))
    done = enfold("run", file, out)
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    for line in (
        "control: the best member, trained on as long as route",
        "control-2: the best member, trained on as long as soft",
        "of-two, route, soft: folded from the first 2 members, and the gain is that of their ensemble, which has no"
        " row",
    ):
        assert line in shown
        assert f"{line}.\n" in (out / "table.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    summary["rows"]["ensemble of 2"] = summary["rows"]["ensemble"]
    assert "of their ensemble, the row ensemble of 2" in notes(summary)[-1]


def test_a_method_with_a_plan_of_its_own_keeps_it_and_its_control_trains_as_networks_do(recipe_file):
    recipe = library.run.read_recipe(with_folds(recipe_file, ROUTES))
    soft = recipe.folds[2]
    plan, control = recipe.method_plan(soft, seed=1), recipe.as_long(soft, seed=1)
    assert (train.optimizer, train.lr, train.epochs) == ("adam", 0.1, 1)
    assert control == recipe.members_plan(1).replace(epochs=1)
    assert recipe.as_long(recipe.folds[0], seed=1) is None
    for first, order, epochs in ((3, "sequential", 2), (3, "joint", 1), (2, "sequential", 1)):
        changed = soft.model_copy(update={"first": first, "order": order})
        assert recipe.as_long(changed, seed=1).epochs == epochs, "one training for each member that is added"
    assert recipe.as_long(recipe.folds[1], seed=1) == recipe.members_plan(1).replace(epochs=2)


@pytest.mark.parametrize(
    ("fold", "said"),
    [
        ("{method: average, first: 4}", "there are 3"),
        ("{method: average, first: 0}", "greater than or equal to 1"),
        ("{method: average, seeds: [7]}", "'average' is of seeds [7], none of which the run has: choose among [0]"),
        ("{method: average, then: [zipit]}", "repair"),
        ("{method: average, then: [{method: repair, kind: paint}]}", "rescale"),
        ("{method: average, then: [{method: kd, tau: 2}]}", "no setting 'tau'"),
        ("{method: repair}", "no fold 'repair', which is a step: let it follow a fold, as then: [repair]"),
    ],
)
def test_a_wrong_route_is_refused_with_its_line(enfold, recipe_file, tmp_path, fold, said):
    done = enfold("run", with_folds(recipe_file, f"steps:\n  - {fold}\n"), tmp_path / "out")
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "out").exists()


def test_a_fold_may_be_of_some_seeds_and_its_row_is_theirs(enfold, recipe_file, tmp_path):
    folds = "seeds: [0, 1]\nsteps: [average, {method: average, label: of-one, first: 1, seeds: [1]}]\n"
    done = enfold("run", with_folds(recipe_file, folds), tmp_path / "out", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [len(rows[label]["scores"]["accuracy"]["values"]) for label in ("average", "of-one")] == [2, 1]
    there = [(tmp_path / f"out/seed-{seed}/steps/of-one.safetensors").is_file() for seed in (0, 1)]
    assert there == [False, True]
    assert enfold("run", recipe_file, tmp_path / "out", "--resume").code == 0
    shown = enfold("report", tmp_path / "out")
    assert shown.code == 0, shown.err


def test_a_fold_that_is_a_member_as_it_was_says_so_and_makes_no_headline(enfold, finished):
    done = enfold("merge", finished, "soup", "--set", "score=nll")
    assert done.code == 0, done.err
    about = json.loads((finished / "steps/soup.json").read_text())["about"]
    assert list(about["ingredients"].values()) == [1.0]
    member = next(iter(about["ingredients"]))
    assert f"enfold: soup: it is member {member} alone: its weights are that member's" in done.err
    rows = json.loads((finished / "summary.json").read_text())["rows"]
    assert {label for label, row in rows.items() if "member" in row} == {"soup"}
    for label in ("average", "distill-fresh"):
        assert collect(finished).headline.label != "soup"
        assert enfold("drop", finished, label).code == 0
    content = collect(finished)
    assert content.headline is None
    assert "the weights of soup are a member's own" in headline(content).sentence
    asked = collect(finished, label="soup")
    assert f"soup has the weights of member {member}, unchanged." in headline(asked).remarks


def test_a_distillation_that_returned_its_start_is_marked_in_the_table_and_the_card(enfold, finished):
    done = enfold("distill", finished, "kd", "--set", "train.lr=50", "--label", "kept")
    assert done.code == 0, done.err
    summary = json.loads((finished / "summary.json").read_text())
    start = summary["rows"]["kept"]["unchanged"]
    assert start[0].startswith("member ")
    control = summary["controls"]["kept"]
    assert f"enfold: kept: training returned its start, {start[0]}, unchanged" in done.err
    table = (finished / "table.md").read_text()
    assert "| kept (unchanged) |" in table
    history = json.loads((finished / "histories/steps/kept.json").read_text())
    assert history["chosen"] == [0]
    assert history["start"]["validation_nll"][0] <= min(epoch["validation_nll"][0] for epoch in history["epochs"])
    assert enfold("report", "--card", finished, "--label", "kept").code == 0
    card = (finished / "MODEL_CARD.md").read_text()
    assert "| test data | kept (unchanged) |" in card
    assert "training returned its start" in card
    assert f"Use {control} " in card, "which solves this task"
    assert enfold("report", finished).code == 0
    assert "kept (unchanged)" in (finished / "report.html").read_text()
    rerun = enfold("evaluate", finished, "--json")
    assert json.loads(rerun.out)["rows"]["kept"]["unchanged"] == start, "from what is stored"
