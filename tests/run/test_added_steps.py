"""Steps added to a run: a failing step leaves no trace, an interrupted step resumes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import enfold.train.loop as loop
from enfold.errors import EnfoldError
from enfold.registry import methods
from enfold.run import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.trainings import read_trainings

HOT = ("perm_avg", "--set", "train.epochs=1", "--label", "hot")


def whole(run: Path) -> dict[Path, bytes]:
    """All files of a run but its log, which only grows."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.jsonl"}


def stages(run: Path) -> list[str]:
    opened = RunDirectory.open(run)
    return [training.stage for training in read_trainings(seed_runs(opened, opened.recipe()))]


@pytest.mark.slow
def test_a_failing_step_leaves_the_run_unchanged(enfold, finished):
    before, known = whole(finished), stages(finished)
    refused = enfold("merge", finished, *HOT, "--set", "temperature=1e9")
    assert refused.code == 2
    assert "start from a matching (matched=12)" in refused.err
    assert whole(finished) == before
    assert stages(finished) == known
    assert enfold("evaluate", finished).code == 0
    done = enfold("merge", finished, *HOT, "--set", "matched=12", "--json")
    assert done.code == 0, done.err
    assert "hot" in json.loads(done.out)["rows"]
    assert "steps/hot" in stages(finished)


def test_a_failing_ensemble_leaves_the_run_unchanged(enfold, finished):
    before = whole(finished)
    wild = (
        "batch_ensemble",
        "--label",
        "wild",
        "--set",
        "train.epochs=2",
        "--set",
        "train.optimizer=sgd",
        "--set",
        "train.lr=1.0e+6",
    )
    refused = enfold("train", finished, *wild)
    assert (refused.code, "loss" in refused.err) == (2, True)
    assert whole(finished) == before


@pytest.mark.parametrize("first", [(), ("--set", "first=2")])
def test_a_reference_is_checked_with_the_settings(enfold, finished, first):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    done = enfold("merge", finished, "weight_matching", "--set", "reference=7", *first)
    count = 2 if first else 3
    assert done.code == 2
    says = f"step 'weight_matching': reference must be the number of a member, 0 to {count - 1}, got 7"
    assert says in done.err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def not_a_number(network):
    with torch.no_grad():
        next(network.parameters()).fill_(torch.nan)
    return network


def impossible(network):
    raise EnfoldError("it cannot be: choose another")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [impossible, not_a_number])
def test_a_step_that_fails_for_one_seed_is_removed_from_all(enfold, tmp_path, small_data, monkeypatch, spoil):
    out, average, calls = tmp_path / "out", methods("merge")["average"], []
    settings = ("train.epochs=1", "cost=false", "data.val_size=60", "network={name: mlp, widths: [8]}", "seeds=[0, 1]")
    flags = [part for change in settings for part in ("--set", change)]
    assert enfold("train", out, "--data", small_data, "--members", 2, *flags).code == 0
    before = whole(out)

    def second_fails(models, train=None, *, seed=0):
        calls.append(models)
        network = average.target(models, train)
        return spoil(network) if len(calls) == 2 else network

    with monkeypatch.context() as patched:
        patched.setitem(methods("merge"), "average", dataclasses.replace(average, target=second_fails))
        assert enfold("merge", out, "average").code == 2
    assert len(calls) == 2
    assert whole(out) == before
    assert enfold("merge", out, "average").code == 0


def test_an_interrupted_step_resumes(enfold, finished, interrupted, monkeypatch):
    again = ("distill", finished, "kd", "--label", "again", "--set", "init=random")
    interrupted(3, *again)
    file = finished / "steps/again.checkpoint.safetensors"
    assert file.exists()
    moved = finished.parent / "small.npz"
    moved.rename(finished.parent / "moved.npz")
    assert enfold(*again).code == 2, "its data is not there"
    assert file.exists(), "which is not the fold's fault"
    (finished.parent / "moved.npz").rename(moved)
    written, save = [], loop.save_checkpoint
    monkeypatch.setattr(loop, "save_checkpoint", lambda *given: written.append(given[0]) or save(*given))
    assert enfold(*again).code == 0
    assert written == [file], "one epoch of three was left"
    expected = load_file(finished / "steps/distill-fresh.safetensors")
    found = load_file(finished / "steps/again.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_an_interrupted_step_may_be_replaced(enfold, finished, interrupted):
    """Neither its checkpoint nor its control is used."""
    pending = ("distill", finished, "kd", "--label", "new")
    interrupted(2, *pending, "--set", "temperature=4", "--set", "train.epochs=2")
    interrupted(3, "run", finished / "recipe.yaml", finished, "--resume")  # after its control
    assert (finished / "controls/control-2.safetensors").exists()
    done = enfold(*pending, "--set", "init=random", "--set", "train.epochs=1", "--json")
    assert done.code == 0, done.err
    history = json.loads((finished / "histories/controls/control-2.json").read_text())
    assert len(history["epochs"]) == 1
    steps = yaml.safe_load((finished / "recipe.yaml").read_text())["steps"]
    assert [(step["label"], step.get("temperature")) for step in steps][2:] == [("new", None)]
    beside = ("kd", "--label", "beside", "--set", "init=random", "--set", "train.epochs=1")
    assert enfold("distill", finished, *beside).code == 0
    one, other = (load_file(finished / f"steps/{label}.safetensors") for label in ("new", "beside"))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    refused = enfold(*pending, "--set", "temperature=2")
    assert (refused.code, "got 'new' with other options" in refused.err) == (2, True)
