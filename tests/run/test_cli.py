"""The verbs, end to end on small data, and one wrong input of each kind."""

import json
import pickle
from pathlib import Path

import pytest
import torch

import enfold as library
from enfold.registry import PACKAGES, methods
from fresh import run_python


def test_run_writes_everything_and_prints_a_table(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = enfold("run", recipe_file, out)
    assert done.code == 0, done.err
    for word in ("mean member", "ensemble of 2", "control", "average", "distill-fresh", "NLL (nats)", str(out)):
        assert word in done.out
    for file in (
        "recipe.yaml",
        "run.json",
        "log.jsonl",
        "members/members.safetensors",
        "members/history.json",
        "steps/average.safetensors",
        "steps/distill-fresh.json",
        "controls/control.safetensors",
        "predictions/ensemble.safetensors",
        "results.json",
        "summary.json",
        "table.md",
    ):
        assert (out / file).is_file(), file
    assert not list(out.rglob("*.part")), "temporary files are removed"
    assert not list(out.rglob("*checkpoint*")), "checkpoints of finished trainings are removed"


def test_a_stored_step_loads_without_enfold_and_predicts_the_same(finished: Path) -> None:
    from safetensors.torch import load_file

    network = library.load(finished / "steps/average.safetensors")
    plain = library.networks.MLP(16, [16], 4)
    plain.load_state_dict(load_file(finished / "steps/average.safetensors"))
    inputs = torch.randn(5, 1, 4, 4)
    torch.testing.assert_close(plain.eval()(inputs), network(inputs), rtol=0, atol=0)


def test_separate_commands_equal_run(enfold, finished: Path, tmp_path: Path, small_data: Path) -> None:
    steps = tmp_path / "steps"
    settings = ["train.epochs=3", "train.batch_size=32", "train.lr=0.01", "cost=false", "data.val_size=60"]
    flags = [part for setting in settings for part in ("--set", setting)]
    network = ("--set", "network={name: mlp, widths: [16]}")
    assert enfold("train", steps, "--data", small_data, "--members", 3, *flags, *network).code == 0
    merged = enfold("merge", steps, "average")
    assert (merged.code, merged.out.startswith("steps: test data, 1 seed")) == (0, True)
    shown = enfold("distill", steps, "kd", "--label", "distill-fresh", "--set", "init=random", "--json")
    assert shown.code == 0, shown.err
    rows = json.loads(shown.out)["rows"]
    expected = json.loads((finished / "summary.json").read_text())["rows"]
    for name in ("mean member", "ensemble", "control", "average", "distill-fresh"):
        assert rows[name]["scores"] == expected[name]["scores"]
    again = enfold("evaluate", steps, "--json")
    assert json.loads(again.out)["rows"] == rows


def test_several_seeds_give_standard_deviations(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = enfold("run", recipe_file, out, "--seed", 3, "--seed", 5, "--json")
    summary = json.loads(done.out)
    assert summary["seeds"] == [3, 5]
    values = summary["rows"]["ensemble"]["scores"]["nll"]
    assert values["std"] > 0
    assert values["mean"] == pytest.approx(sum(values["values"]) / 2)
    assert (out / "seed-3/members/members.safetensors").is_file()


def test_cost_is_measured_and_drawn(enfold, costed: Path) -> None:
    assert "latency, 128 (ms)" in enfold("evaluate", costed).out
    rows = json.loads((costed / "summary.json").read_text())["rows"]
    assert rows["ensemble"]["cost"]["ratios"]["parameters"] == 3
    assert rows["average"]["cost"]["ratios"]["flops"] == 1
    assert (costed / "quality-cost.svg").read_text().startswith("<?xml")
    assert (costed / "quality-cost.png").stat().st_size > 5000


def test_a_run_is_not_overwritten_and_resumes(enfold, recipe_file: Path, finished: Path) -> None:
    refused = enfold("run", recipe_file, finished)
    assert (refused.code, "--resume" in refused.err) == (2, True)
    assert enfold("run", recipe_file, finished, "--resume").code == 0
    other = enfold("run", recipe_file, finished, "--resume", "--set", "train.epochs=4")
    assert other.code == 2
    assert "another" in other.err


def test_dry_run_estimates_and_writes_nothing(enfold, recipe_file: Path, tmp_path: Path) -> None:
    done = enfold("run", recipe_file, tmp_path / "out", "--dry-run")
    assert done.code == 0
    assert "min for 3 trainings and" in done.out
    assert not (tmp_path / "out").exists()


def test_methods_data_and_doctor_list_what_there_is(enfold) -> None:
    listed = json.loads(enfold("methods", "--json").out)
    everything = [(name, kind) for kind in PACKAGES for name in methods(kind)]
    assert sorted((each["name"], each["kind"]) for each in listed) == sorted(everything)
    assert all(each["idea"].endswith(".") for each in listed)
    shown = enfold("methods").out
    assert all(each["name"] in shown for each in listed)
    assert "fashion-mini" in enfold("data").out
    assert json.loads(enfold("data", "fashion-mini", "--json", "--check").out)[0]["present"] is True
    assert any(row["package"] == "torch" and row["version"] for row in json.loads(enfold("doctor", "--json").out))


def test_user_network_and_data(enfold, tmp_path: Path, small_data: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "from torch import nn\nimport enfold\n"
        "def network(shape, num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))\n"
        f"def data():\n    return enfold.data.load({str(small_data)!r})\n"
    )
    out = tmp_path / "out"
    options = ["--network", f"{code}:network", "--data", f"{code}:data", "--members", 2, "--set", "train.epochs=1"]
    assert "--trust-code" in enfold("train", out, *options).err
    assert enfold("train", out, *options, "--trust-code").code == 0
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"network: {code}:network\ndata: {small_data}\ntrain: {{epochs: 1}}\ncost: false\n")
    refused = enfold("run", recipe, tmp_path / "other")
    assert refused.code == 2
    assert "--trust-code" in refused.err
    assert enfold("run", recipe, tmp_path / "other", "--trust-code").code == 0


def test_checkpoints_of_other_networks_are_refused(tmp_path: Path) -> None:

    with (tmp_path / "pickled.pt").open("wb") as file:
        pickle.dump({"anything": Path("x")}, file)
    with pytest.raises(library.EnfoldError, match="pickled object"):
        library.DeepEnsemble.from_checkpoints(tmp_path / "pickled.pt", lambda: torch.nn.Linear(3, 2))
    torch.save(torch.nn.Linear(4, 2).state_dict(), tmp_path / "other.pt")
    with pytest.raises(library.EnfoldError, match=r"shape of 'weight' is \(2, 4\) instead of \(2, 3\)"):
        library.DeepEnsemble.from_checkpoints(tmp_path / "other.pt", lambda: torch.nn.Linear(3, 2))


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_was_made_resumes(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".run.json.77.part").write_text("{")
    assert enfold("run", recipe_file, out, "--resume").code == 0
    (out / "recipe.yaml").unlink()
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert (out / "recipe.yaml").is_file()


def test_weights_without_a_manifest_are_made_again(enfold, recipe_file: Path, finished: Path) -> None:
    out = finished
    before = (out / "steps/distill-fresh.safetensors").read_bytes()
    (out / "steps/distill-fresh.json").unlink()
    (out / "steps/average.safetensors").unlink()
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert (out / "steps/distill-fresh.safetensors").read_bytes() == before
    assert (out / "steps/average.safetensors").is_file()


def test_a_folder_with_other_files_is_refused(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "recipe.yaml").write_text("mine")
    assert enfold("run", recipe_file, out, "--resume").code == 2
    assert (out / "recipe.yaml").read_text() == "mine"


@pytest.mark.slow
def test_a_run_with_an_added_step_resumes_by_its_first_recipe(enfold, recipe_file: Path, finished: Path) -> None:
    assert enfold("distill", finished, "kd", "--label", "soft", "--set", "temperature=4").code == 0
    again = enfold("run", recipe_file, finished, "--resume", "--json")
    assert again.code == 0
    assert "soft" in json.loads(again.out)["rows"]


@pytest.mark.slow
def test_a_student_of_another_shape_is_evaluated_again(enfold, finished: Path) -> None:
    smaller = ["--label", "small", "--set", "student={name: mlp, widths: [4]}"]
    first = enfold("distill", finished, "kd", *smaller, "--json")
    assert first.code == 0, first.err
    assert json.loads(enfold("evaluate", finished, "--json").out)["rows"] == json.loads(first.out)["rows"]


def test_code_in_a_recipe_needs_trust(enfold, tmp_path: Path, small_data: Path) -> None:
    code, ran = tmp_path / "own.py", tmp_path / "ran"
    code.write_text(
        f"from torch import nn\nopen({str(ran)!r}, 'w').close()\ndef network():\n    return nn.Linear(1, 1)\n"
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"data: {small_data}\nsteps: [{{method: kd, student: '{code}:network'}}]\n")
    assert "--trust-code" in enfold("run", recipe, tmp_path / "out").err
    opened = tmp_path / "given"
    opened.mkdir()
    (opened / "run.json").write_text('{"format": 2}')
    (opened / "members").mkdir()
    for ending in ("json", "safetensors"):
        (opened / f"members/members.{ending}").touch()
    (opened / "recipe.yaml").write_text(f"data: {small_data}\nnetwork: {code}:network\n")
    assert "--trust-code" in enfold("evaluate", opened).err
    assert "--trust-code" in enfold("merge", opened, "average").err
    assert not ran.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", "--device", "tpu"],
        ["average", "--label", "../../escaped"],
        ["average", "--label", "control"],
        ["average", "--set", "train=5"],
        ["average", "--set", "label.x=3"],
        ["kd", "--set", "train.epochs=["],
        ["kd", "--set", "alpha=2"],
        ["nothing"],
    ],
)
def test_an_invalid_step_leaves_the_run_unchanged(enfold, finished: Path, arguments) -> None:
    out = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = enfold("distill" if arguments[0] == "kd" else "merge", out, *arguments)
    assert done.code == 2
    assert done.err.startswith("enfold: ")
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_evaluating_needs_trained_members(enfold, finished: Path) -> None:
    out = finished
    (out / "predictions/average.safetensors").write_bytes(b"damaged")
    before = json.loads((out / "summary.json").read_text())["rows"]
    assert json.loads(enfold("evaluate", out, "--json").out)["rows"] == before
    (out / "members/members.json").unlink()
    refused = enfold("evaluate", out)
    assert refused.code == 2
    assert "trained members" in refused.err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return nn.Sequential(nn.Flatten(), nn.Linear(15, num_classes))", "(1, 4, 4)"),
        ("return nn.Sequential(nn.Flatten(), nn.Linear(16, 7))", "got (7,)"),
        ("raise RuntimeError('out of ideas')", "out of ideas"),
    ],
)
def test_a_network_that_does_not_fit_is_one_sentence(enfold, tmp_path: Path, small_data: Path, body, says) -> None:
    code = tmp_path / "own.py"
    code.write_text(f"from torch import nn\ndef network(shape, num_classes):\n    {body}\n")
    done = enfold("train", tmp_path / "out", "--data", small_data, "--network", f"{code}:network", "--trust-code")
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 2  # and the file that runs
    assert not (tmp_path / "out").exists()


def test_dry_run_and_version_for_machines(enfold, recipe_file: Path, tmp_path: Path) -> None:
    assert json.loads(enfold("run", recipe_file, tmp_path / "out", "--dry-run", "--json").out)["trainings"] == 3
    assert enfold("--version").out == f"enfold {library.__version__}\n"


def test_train_prints_json(enfold, tmp_path: Path, small_data: Path) -> None:
    options = ["--data", small_data, "--members", 2, "--set", "train.epochs=1", "--json"]
    made = json.loads(enfold("train", tmp_path / "out", *options).out)
    assert made == {"run": str(tmp_path / "out"), "members": 2, "seeds": [0]}


def stopped(*ignored: object, **settings: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_prints_how_to_continue(enfold, recipe_file, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("enfold.run.seed_run.SeedRun.check", stopped)
        done = enfold("run", recipe_file, out, "--set", "train.epochs=2")
    assert (done.code, out.exists()) == (130, False)
    again = f"enfold run {recipe_file} {out} --set train.epochs=2"
    assert done.err == f"enfold: stopped before anything was written: start again with  {again}\n"
    with monkeypatch.context() as patched:
        patched.setattr("enfold.run.seed_run.fit", stopped)
        done = enfold("run", recipe_file, out)
    assert done.code == 130
    assert done.err.splitlines()[-1].startswith("enfold: stopped; finished models and the last state")
    assert f"continue with  enfold run {recipe_file} {out} --resume" in done.err
    assert enfold("run", recipe_file, out, "--resume").code == 0


def test_a_method_is_described_with_its_options(enfold) -> None:
    row = json.loads(enfold("methods", "batch-ensemble", "--json").out)
    options = {option["name"]: option for option in row["options"]}
    assert "standard deviation" in options["spread"]["help"].lower()
    assert (options["rank"]["type"], options["rank"]["default"]) == ("int > 0", "1")
    shown = enfold("methods", "batch_ensemble").out
    assert all(word in shown for word in ("Y. Wen, D. Tran, J. Ba", "fast_decay", "Differs from the paper"))
    refused = enfold("methods", "batch_ensembel")
    assert refused.code == 2
    assert "did you mean 'batch_ensemble'" in refused.err


def test_the_table_in_the_file_has_the_quartiles_of_a_latency(costed: Path) -> None:
    seconds = json.loads((costed / "summary.json").read_text())["rows"]["ensemble"]["cost"]["latency"]["1"]
    median, lower, upper = (f"{1e3 * seconds[name]:.2f}" for name in ("median", "lower", "upper"))
    assert f"{median} [{lower}, {upper}] (" in (costed / "table.md").read_text()


def test_every_command_shows_examples(enfold) -> None:
    from typer.main import get_command

    from enfold.cli.app import app

    commands = get_command(app).commands
    assert set(commands) == {
        "demo", "run", "gather", "train", "distill", "merge", "compress", "evaluate", "drop", "export", "report",
        "analyse", "watch", "methods", "data", "doctor",
    }  # fmt: skip
    for name in commands:
        shown = enfold(name, "--help")
        assert shown.code == 0
        assert "Examples" in shown.out
        assert f"enfold {name}" in shown.out


def test_a_run_of_another_format_is_refused_with_the_version_that_wrote_it(enfold, finished: Path, recipe_file) -> None:
    manifest = json.loads((finished / "run.json").read_text())
    manifest["versions"]["enfold"] = "0.1.7"
    (finished / "run.json").write_text(json.dumps({**manifest, "format": 1}))
    for words in (["evaluate", finished], ["report", finished], ["run", recipe_file, finished, "--resume"]):
        done = enfold(*words)
        assert (done.code, "0.1.7" in done.err, "format 1" in done.err) == (2, True, True), done.err
    (finished / "run.json").write_text("[]")
    assert enfold("evaluate", finished).code == 2


def test_options_of_a_new_run_are_refused_when_a_method_is_added(enfold, finished: Path) -> None:
    for flags in (["--members", 3], ["--data", "digits"], ["--resume"], ["--dry-run"], ["--seed", 1]):
        done = enfold("train", finished, "batch-ensemble", *flags)
        assert (done.code, str(flags[0]) in done.err) == (2, True), done.err
    done = enfold("train", finished.parent / "new", "--label", "x")
    assert (done.code, "--label" in done.err) == (2, True)


def test_help_lists_the_methods_and_the_options_of_the_one_that_is_named(enfold, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb, kind, name in (
        ("train", "ensemble", "batch_ensemble"),
        ("distill", "distill", "kd"),
        ("merge", "merge", "zipit"),
    ):
        done = enfold(verb, "--help")
        assert (done.code, [each for each in methods(kind) if each not in done.out]) == (0, [])
        method = methods(kind)[name]
        done = enfold(verb, "RUN", name.replace("_", "-"), "--help")
        assert (done.code, [option for option in method.arguments if f"{option} (" not in done.out]) == (0, [])
        assert "enfold methods mine.py:f --trust-code" in enfold(verb, "RUN", "mine.py:f", "--help").out


def test_the_settings_of_training_are_listed_as_options(enfold) -> None:
    row = json.loads(enfold("methods", "train", "--json").out)
    names = [option["name"] for option in row["options"]]
    assert {"epochs", "lr", "select"} <= set(names)
    assert not {"seed", "device"} & set(names), "options of a run"
    assert all(option["help"] for option in row["options"])
    shown = enfold("methods", "train").out
    assert all(name in shown for name in names)
    assert "enfold methods train" in enfold("run", "--help").out


@pytest.mark.parametrize("module", ["enfold", "enfold.cli"])
def test_the_package_is_a_program(module, tmp_path) -> None:
    done = run_python(None, module, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "enfold")
