"""Methods of a run that were interrupted or are no longer wanted: they hold up no other, and can be dropped."""

import json
import shlex
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from enfold.run import RunDirectory, drop_step, execute
from enfold.run.collect import collect
from enfold.run.execute import list_unfinished

SHORT = ("kd", "--set", "init=random", "--set", "train.epochs=1")
SLOW = ("kd", "--label", "slow", "--set", "init=random", "--set", "train.epochs=2")


def whole(run: Path) -> dict[str, bytes]:
    """All files of a run but its log, which only grows."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "log.jsonl"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def left(run: Path) -> list[str]:
    opened = RunDirectory.open(run)
    return list_unfinished(opened, opened.recipe())


def rows(run: Path) -> list[str]:
    return list(json.loads((run / "summary.json").read_text())["rows"])


@pytest.mark.parametrize(
    "verb",
    [
        ("merge", "average", "--label", "other"),
        pytest.param(("train", "bagging"), marks=pytest.mark.slow),
        ("evaluate",),
    ],
)
def test_an_interrupted_step_does_not_block_others(enfold, finished, interrupted, verb):
    interrupted(2, "distill", finished, *SLOW)
    done = enfold(verb[0], finished, *verb[1:])
    assert done.code == 0, done.err
    assert "slow" not in "".join(line for line in done.err.splitlines() if "not finished" not in line)
    assert left(finished) == ["control-2", "slow"]
    assert "slow" not in rows(finished)
    assert verb[-1] in (*rows(finished), "evaluate")
    told = next(line for line in done.err.splitlines() if "not finished: control-2, slow" in line)
    assert enfold(*shlex.split(told.split("finish with  ")[1].split(", or")[0])[1:]).code == 0
    assert left(finished) == []
    assert {"slow", "control-2"} <= set(rows(finished))
    assert enfold(*shlex.split(told.split("drop with  ")[1])[1:]).code == 0
    assert not {"slow", "control-2"} & set(rows(finished))


@pytest.mark.slow
def test_adding_and_dropping_a_step_leaves_the_run_unchanged(enfold, costed, interrupted):
    """All files of the method and its control go, of the finished and of the interrupted, and nothing else."""
    assert enfold("evaluate", costed).code == 0  # draws with today's date
    before = whole(costed)
    assert enfold("distill", costed, *SLOW).code == 0
    assert len(whole(costed)) > len(before)
    shown = enfold("drop", costed, "slow")
    assert (shown.code, "slow" in shown.out, "'slow' was removed" in shown.err) == (0, False, True)
    after = whole(costed)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name] and name[:7] != "quality"] == []
    interrupted(2, "distill", costed, *SLOW)
    assert "steps/slow.checkpoint.safetensors" in whole(costed)
    assert enfold("drop", costed, "slow").code == 0
    assert whole(costed).keys() == before.keys()


@pytest.mark.slow
def test_other_controls_keep_their_names(enfold, finished):
    for label, epochs in (("two", 2), ("one", 1)):
        words = ("kd", "--label", label, "--set", "init=random", "--set", f"train.epochs={epochs}")
        assert enfold("distill", finished, *words).code == 0
    kept = {name: content for name, content in whole(finished).items() if "control-3" in name}
    assert enfold("drop", finished, "two").code == 0
    assert left(finished) == []
    assert {name: content for name, content in whole(finished).items() if "control-" in name} == kept
    assert [name for name in rows(finished) if "control" in name] == ["control", "control-3"]
    recipe = yaml.safe_load((finished / "recipe.yaml").read_text())
    assert recipe["control_names"] == {"one": "control-3"}
    assert enfold("distill", finished, "kd", "--label", "four", "--set", "train.epochs=4").code == 0
    assert {"control", "control-2", "control-3"} <= set(rows(finished))
    history = json.loads((finished / "histories/controls/control-2.json").read_text())
    assert len(history["epochs"]) == 4


def test_a_control_of_another_step_is_retained(enfold, finished):
    assert enfold("distill", finished, "kd", "--label", "as-long", "--set", "temperature=2").code == 0
    before = load_file(finished / "controls/control.safetensors")
    assert enfold("drop", finished, "distill-fresh").code == 0
    assert rows(finished)[-3:] == ["control", "average", "as-long"]
    assert load_file(finished / "controls/control.safetensors").keys() == before.keys()


def test_dropping_can_be_stopped_and_done_again(enfold, finished, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "write_recipe", stop)
        assert enfold("drop", finished, "distill-fresh").code == 130
    assert left(finished) == ["control", "distill-fresh"]
    assert enfold("report", finished).code == 0
    assert enfold("drop", finished, "distill-fresh").code == 0
    assert (left(finished), rows(finished)[-1]) == ([], "average")


@pytest.mark.slow
def test_dropping_can_be_killed_before_any_change_of_a_file(finished, tmp_path, monkeypatch):
    """The run can be read then, and dropping again leaves what an uninterrupted command does."""
    changes = {name: getattr(Path, name) for name in ("replace", "unlink")}
    left_until, done = [0], []

    def killed_at(name):
        def change(path, *given, **named):
            if name == "replace" or (path.is_file() and path.suffix != ".part" and path.name != ".lock"):
                left_until[0] -= 1
                if left_until[0] == 0:
                    raise KeyboardInterrupt
            return changes[name](path, *given, **named)

        return change

    def drop(run: Path) -> None:
        drop_step(RunDirectory.open(run), "distill-fresh")

    expected = shutil.copytree(finished, tmp_path / "expected")
    drop(expected)
    for name in changes:
        monkeypatch.setattr(Path, name, killed_at(name))
    for number in count(1):
        run = shutil.copytree(finished, tmp_path / f"killed-{number}")
        left_until[0] = number
        with suppress(KeyboardInterrupt):
            drop(run)
            done.append(number)
        if done:
            break
        left_until[0] = 0
        assert collect(run).summary["rows"]
        if "distill-fresh" in (run / "recipe.yaml").read_text():
            drop(run)
        execute(RunDirectory.open(run), RunDirectory.open(run).recipe(), only=())
        assert whole(run) == whole(expected), number
    assert number > 10


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("control", "'control', the control of distill-fresh: drop that"),
        ("ensemble", "the run has average, distill-fresh, got 'ensemble': correct the label"),
        ("averag", "did you mean 'average'?"),
    ],
)
def test_invalid_labels_cannot_be_dropped(enfold, finished, label, says):
    before = whole(finished)
    refused = enfold("drop", finished, label)
    assert (refused.code, says in refused.err) == (2, True), refused.err
    assert whole(finished) == before


@pytest.mark.slow
def test_a_method_of_some_seeds_only_is_not_evaluated_yet(enfold, finished, tmp_path, small_data, interrupted):
    out = tmp_path / "seeds"
    settings = ("train.epochs=1", "cost=false", "data.val_size=60", "network={name: mlp, widths: [8]}", "seeds=[0, 1]")
    flags = [part for change in settings for part in ("--set", change)]
    assert enfold("train", out, "--data", small_data, "--members", 2, *flags).code == 0
    interrupted(2, "distill", out, *SHORT)  # of the second seed
    assert (out / "seed-0/steps/kd.safetensors").exists()
    assert enfold("evaluate", out).code == 0
    assert "kd" not in rows(out)
    dropped = enfold("drop", out, "kd", "--json")
    assert "kd" not in json.loads(dropped.out)["rows"]
    assert not list(out.rglob("kd*"))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            "{short: check}",
            "they are 'control' or begin with 'control-', each for the label of a step, got short: check",
        ),
        ("{shirt: control}", "each for the label of a step, got shirt: control"),
        ("{short: control, distill-fresh: control}", "'short' trains differently from the other steps of 'control'"),
    ],
)
def test_a_control_of_a_wrong_name_is_refused(enfold, recipe_file, tmp_path, names, says):
    fold = "  - {method: kd, label: short, train: {epochs: 1}}\n"
    recipe_file.write_text(f"{recipe_file.read_text()}{fold}control_names: {names}\n")
    refused = enfold("run", recipe_file, tmp_path / "out")
    assert (refused.code, says in refused.err) == (2, True), refused.err
