"""Distillation and merge steps: students of all kinds, chains of steps, stored, resumed, refused before training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import enfold as library
from enfold.report.headline import summarize_run
from enfold.report.table import table_notes
from enfold.run.collect import collect

STEPS = """
steps:
  - {method: latent_be, label: latent, perturb: tdiv_sdiv}
  - {method: kd, label: into-two, init: random, student: {method: batch_ensemble, num_members: 2}}
  - {method: one_to_one, label: heads, student: {method: batch_ensemble}, init: average, weight_penalty: 0.1}
  - {method: proxy_end2, label: proxy, init: random}
  - {method: kd, label: small, student: {name: mlp, widths: [8]}, perturb: {method: conf_ods, step: 2}}
  - {method: hydra, label: hydra, first_epochs: 1}
"""


def with_steps(recipe_file: Path, steps: str) -> Path:
    text = recipe_file.read_text()
    recipe_file.write_text(text[: text.index("steps:")] + steps.lstrip())
    return recipe_file


@pytest.mark.slow
def test_every_student_is_a_row(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_steps(recipe_file, STEPS)
    done = enfold("run", file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    labels = ["latent", "into-two", "heads", "proxy", "small", "hydra"]
    assert [row for row in rows if row in labels] == labels
    for label in (*labels, "control"):
        assert f"seed 0: {label} 100 %" in done.err
    assert all(rows[label]["scores"]["accuracy"]["mean"] > 0.3 for label in labels)
    assert {label for label in labels if "diversity" in rows[label]} == {"into-two", "heads", "hydra"}
    make = library.networks.MLP(16, [16], 4)
    kinds = {label: library.load(out / "steps" / f"{label}.safetensors", make) for label in ("latent", "heads")}
    assert type(kinds["latent"]) is library.networks.MLP
    assert kinds["heads"].num_members == 3
    assert type(library.load(out / "steps" / "proxy.safetensors")) is library.networks.MLP
    cached = list((out / "teacher-logits").iterdir())
    assert len(cached) == 1  # computed once for all steps that do not change inputs
    before = {path: path.read_bytes() for path in (out / "steps").iterdir()}
    again = enfold("run", file, out, "--resume", "--json")
    assert json.loads(again.out)["rows"] == rows
    assert {path: path.read_bytes() for path in (out / "steps").iterdir()} == before


def test_a_dirichlet_student_is_evaluated_by_its_mean(enfold, finished, tmp_path):
    out = finished
    done = enfold("distill", out, "proxy-end2", "--label", "proxy", "--json")
    assert done.code == 0, done.err
    network = library.load(out / "steps" / "proxy.safetensors")
    recipe = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    expected = library.evaluate(library.Dirichlet(network, 1.0), recipe).scores["nll"]
    found = json.loads(done.out)["rows"]["proxy"]["scores"]["nll"]["mean"]
    assert found == pytest.approx(expected)
    assert found != pytest.approx(library.evaluate(network, recipe).scores["nll"])


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("{method: one_to_one, label: a, student: {method: batch_ensemble, num_members: 2}}", "2"),
        ("{method: kd, label: a, perturb: tdiv_sdiv}", "student"),
        ("{method: kd, label: a, perturb: wobble}", "there is no perturb method 'wobble'"),
        ("{method: kd, label: a, perturb: {method: ods, stepp: 1}}", "did you mean 'step'"),
        ("{method: kd, label: a, init: als}", "needs a BatchEnsemble"),
        ("{method: kd, label: a, init: als, student: {method: bagging}}", "needs a BatchEnsemble"),
        ("{method: kd, label: a, alpha: 2}", "alpha must be"),
        ("{method: kd, label: a, temperature: 0}", "temperature must be"),
        ("{method: kd, label: a, temperature: warm}", "temperature must be"),
        ("{method: kd, label: a, weight_penalty: much}", "weight_penalty must be"),
        ("{method: kd, label: a, student: {method: 3}}", "a name or a mapping with method"),
        ("{method: kd, label: a, student: {method: batch_ensemble, members: 8}}", "no option 'members'"),
        ("{method: kd, label: a, student: {name: mlp, widths: wide}}", "widths"),
        ("{method: kd, label: a, student: mlp, init: best_member}", "remove init or student"),
        ("{method: ae_kd, label: a, tolerance: 0.1}", "tolerance"),
        ("{method: latent_be, label: a, student: {method: bagging}}", "LatentBE"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(enfold, recipe_file, tmp_path, step, says):
    done = enfold("run", with_steps(recipe_file, f"steps:\n  - {step}\n"), tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_corrupted_copies_are_scored_beside_the_clean(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text().replace("cost: false", "cost: false\nCORRUPTED")
    for spec, says in (("{severities: [6]}", "6"), ("{kinds: [rain]}", "rain"), ("{kinds: [fog]}", "at least 8")):
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


CHAIN = """
steps:
  - {method: average, label: of-two, first: 2}
  - {method: weight_matching, label: matched, first: 2, repair: none}
  - {method: repair, label: repaired, first: 2, init: matched}
  - {method: kd, label: distilled, first: 2, init: repaired, train: {epochs: 2}}
  - {method: perm_avg, label: soft, first: 2, train: {epochs: 1}}
"""


def test_a_chain_of_steps_and_a_merge_of_some_members_are_rows(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_steps(recipe_file, CHAIN)
    done = enfold("run", file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert {"of-two", "matched", "repaired", "distilled", "soft", "control", "control-2"} <= set(rows)
    data = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    members = library.load(out / "members" / "members.safetensors", library.networks.MLP(16, [16], 4))
    stored = {
        label: library.load(out / "steps" / f"{label}.safetensors") for label in ("of-two", "matched", "repaired")
    }
    expected = {
        "of-two": library.merge.average(members[:2], data),
        "matched": library.merge.weight_matching(members[:2], data, repair="none"),
        "repaired": library.merge.repair(stored["matched"], members[:2], data),
    }
    for label, network in expected.items():
        state = network.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in stored[label].state_dict().items()), label
    identity = json.loads((out / "steps" / "distilled.json").read_text())["about"]["made_from"]
    assert identity["weights of 'repaired'"]
    assert rows["ensemble of 2"]["gain_recovered"]["mean"] != pytest.approx(1)  # of what all three gain
    assert rows["distilled"]["scores"]["accuracy"]["mean"] > 0.8
    refused = enfold("drop", out, "matched")
    assert (refused.code, "used by repaired" in refused.err) == (2, True)


@pytest.mark.slow
def test_a_step_is_not_used_with_another_start_than_it_had(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_steps(recipe_file, CHAIN)
    assert enfold("run", file, out).code == 0
    manifest = out / "steps" / "distilled.json"
    content = json.loads(manifest.read_text())
    content["about"]["made_from"]["weights of 'repaired'"] = "0" * 64
    manifest.write_text(json.dumps(content))
    done = enfold("evaluate", out)
    assert (done.code, "weights of 'repaired'" in done.err) == (2, True), done.err


def test_an_ensemble_step_teaches_and_a_step_is_the_start_on_the_command_line(enfold, finished):
    assert enfold("train", finished, "batch-ensemble", "--label", "be", "--set", "train.epochs=1").code == 0
    flags = ["--teacher", "be", "--init", "average", "--label", "taught", "--set", "train.epochs=1", "--json"]
    done = enfold("distill", finished, "kd", *flags)
    assert done.code == 0, done.err
    identity = json.loads((finished / "steps" / "taught.json").read_text())["about"]["made_from"]
    assert {"weights of 'be'", "weights of 'average'"} <= identity.keys()
    into = ["--student", "{method: batch_ensemble, rank: 2}", "--label", "into", "--set", "train.epochs=1"]
    assert enfold("distill", finished, "kd", *into).code == 0
    assert library.load(finished / "steps" / "into.safetensors").rank == 2


@pytest.mark.slow
def test_notes_are_printed_below_the_table(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_steps(recipe_file, CHAIN)
    file.write_text(file.read_text().replace("sizes: [2, 3]", "sizes: [3]"))
    done = enfold("run", file, out)
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    for line in (
        "control: the best member, trained further on labels for as many epochs as distilled",
        "control-2: the best member, trained further on labels for as many epochs as soft",
        "of-two, matched, repaired, distilled, soft: made from the first 2 members; the gain is that of their "
        "ensemble, which has no row",
    ):
        assert line in shown
        assert f"{line}.\n" in (out / "table.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    summary["rows"]["ensemble of 2"] = summary["rows"]["ensemble"]
    assert "of their ensemble, the row ensemble of 2" in table_notes(summary)[-1]


def test_a_method_with_published_settings_uses_them_and_its_control_trains_as_networks_do(recipe_file):
    recipe = library.run.read_recipe(with_steps(recipe_file, CHAIN))
    soft = recipe.step("soft")
    config, control = recipe.step_config(soft, seed=1), recipe.control_config(soft, seed=1)
    assert (config.optimizer, config.lr, config.epochs) == ("adam", 0.1, 1)
    assert control == recipe.members_config(1).replace(epochs=1)
    assert recipe.control_config(recipe.step("of-two"), seed=1) is None
    for first, order, epochs in ((3, "sequential", 2), (3, "joint", 1), (2, "sequential", 1)):
        changed = soft.model_copy(update={"first": first, "order": order})
        assert recipe.control_config(changed, seed=1).epochs == epochs, "one training for each member that is added"
    assert recipe.control_config(recipe.step("distilled"), seed=1) == recipe.members_config(1).replace(epochs=2)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("{method: average, first: 4}", "there are 3"),
        ("{method: average, first: 0}", "greater than or equal to 1"),
        ("{method: average, seeds: [7]}", "'average' has seeds [7], none of which the run has: choose from [0]"),
        ("{method: weight_matching, init: best_member}", "remove it"),
        ("{method: repair, init: best_member, kind: paint}", "kind must be"),
        ("{method: kd, tau: 2}", "no option 'tau'"),
        ("{method: repair}", "add init"),
    ],
)
def test_a_wrong_step_is_refused_before_anything_is_written(enfold, recipe_file, tmp_path, step, says):
    done = enfold("run", with_steps(recipe_file, f"steps:\n  - {step}\n"), tmp_path / "out")
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_step_may_have_some_seeds_only(enfold, recipe_file, tmp_path):
    steps = "seeds: [0, 1]\nsteps: [average, {method: average, label: of-one, first: 1, seeds: [1]}]\n"
    done = enfold("run", with_steps(recipe_file, steps), tmp_path / "out", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [len(rows[label]["scores"]["accuracy"]["values"]) for label in ("average", "of-one")] == [2, 1]
    there = [(tmp_path / f"out/seed-{seed}/steps/of-one.safetensors").is_file() for seed in (0, 1)]
    assert there == [False, True]
    assert enfold("run", recipe_file, tmp_path / "out", "--resume").code == 0
    shown = enfold("report", tmp_path / "out")
    assert shown.code == 0, shown.err


def test_a_merge_that_is_a_member_gives_a_warning_and_no_headline(enfold, finished):
    done = enfold("merge", finished, "soup", "--set", "score=nll")
    assert done.code == 0, done.err
    rows = json.loads((finished / "summary.json").read_text())["rows"]
    member = rows["soup"]["member"][0]
    assert f"enfold: soup: its weights are those of member {member}" in done.err
    assert {label for label, row in rows.items() if "member" in row} == {"soup"}
    for label in ("average", "distill-fresh"):
        assert collect(finished).headline.label != "soup"
        assert enfold("drop", finished, label).code == 0
    content = collect(finished)
    assert content.headline is None
    assert "soup has the weights of a single member" in summarize_run(content).sentence
    asked = collect(finished, label="soup")
    assert f"soup has the weights of member {member}, unchanged." in summarize_run(asked).remarks


@pytest.mark.slow
def test_a_distillation_that_returned_its_start_is_marked_in_the_table_and_the_card(enfold, finished):
    done = enfold("distill", finished, "kd", "--set", "train.lr=50", "--label", "kept")
    assert done.code == 0, done.err
    summary = json.loads((finished / "summary.json").read_text())
    start = summary["rows"]["kept"]["unchanged"]
    assert start[0].startswith("member ")
    control = summary["controls"]["kept"]
    assert f"enfold: kept: training returned its initial weights ({start[0]})" in done.err
    table = (finished / "table.md").read_text()
    assert "| kept (unchanged) |" in table
    history = json.loads((finished / "histories/steps/kept.json").read_text())
    assert history["chosen"] == [0]
    assert history["start"]["validation_loss"][0] <= min(epoch["validation_loss"][0] for epoch in history["epochs"])
    assert enfold("report", "--card", finished, "--label", "kept").code == 0
    card = (finished / "MODEL_CARD.md").read_text()
    assert "| test data | kept (unchanged) |" in card
    assert "training returned its initial weights" in card
    assert f"Use {control} " in card, "which solves this task"
    assert enfold("report", finished).code == 0
    assert "kept (unchanged)" in (finished / "report.html").read_text()
    rerun = enfold("evaluate", finished, "--json")
    assert json.loads(rerun.out)["rows"]["kept"]["unchanged"] == start, "from what is stored"


TEACHERS = """
steps:
  - {method: hyper_deep_ensemble, label: hyper-deep, num_members: 2, candidates: 3, stratify: false}
  - {method: swag, label: swag, num_members: 4, start: 0.3}
  - {method: mc_dropout, label: dropout, num_members: 4, inject: 0.2}
  - {method: boosting, label: boosted, train: {epochs: 1, lr: 0.001}}
  - {method: kd, label: of-hyper-deep, teacher: hyper-deep, init: random, student: {method: batch_ensemble}}
  - {method: one_to_one, label: one-to-one, teacher: hyper-deep, student: {method: batch_ensemble}}
  - {method: kd, label: dark-knowledge, teacher: swag, train: {select: last, epochs: 6}}
  - {method: kd, label: of-dropout, teacher: dropout, init: random}
  - {method: latent_be, label: latent, teacher: swag}
  - {method: kd, label: of-boosted, teacher: boosted, train: {select: last, epochs: 6}}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::enfold.ensembles.common.search.FewerCandidatesWarning")
def test_every_ensemble_can_teach(enfold, recipe_file, tmp_path):
    out, file = tmp_path / "out", with_steps(recipe_file, TEACHERS)
    done = enfold("run", file, out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    network = library.networks.MLP(16, [16], 4)
    load = {
        label: library.load(out / "steps" / f"{label}.safetensors", network)
        for label in rows
        if "mean" not in label and "ensemble" not in label and "control" not in label
    }
    teacher = load["hyper-deep"]
    assert load["of-hyper-deep"].num_members == 3  # of the run
    assert load["one-to-one"].num_members == teacher.num_members  # one for each teacher
    assert all(
        isinstance(load[label], library.networks.MLP)
        for label in ("dark-knowledge", "of-dropout", "latent", "of-boosted")
    )
    about = json.loads((out / "steps" / "dark-knowledge.json").read_text())["about"]
    assert "member" in str(about.get("start"))
    data = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    test = {label: library.predict(model, data.test).mean().log_probs[0] for label, model in load.items()}

    def divergence(teacher: str, student: str) -> float:
        return float((test[teacher].exp() * (test[teacher] - test[student])).sum(-1).mean())

    assert divergence("swag", "dark-knowledge") < divergence("swag", "of-boosted")
    assert divergence("boosted", "of-boosted") < divergence("boosted", "dark-knowledge")
    again = enfold(
        "distill", out, "kd", "--teacher", "boosted", "--label", "added", "--set", "train.epochs=1", "--json"
    )
    assert again.code == 0, again.err
    assert "added" in json.loads(again.out)["rows"]
    assert load["boosted"].member_weights == pytest.approx(
        library.load(out / "steps" / "boosted.safetensors", network).member_weights
    )
