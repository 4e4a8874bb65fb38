"""Stored results are used only with their data and settings; a refusal names the difference."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from enfold.run.collect import collect


def change(file: Path, *names: str) -> None:
    """Other values in some arrays of a file, which keep their shapes; of labels, two are exchanged."""
    arrays = dict(np.load(file))
    for name in names:
        if name.startswith("y"):
            other = int(np.flatnonzero(arrays[name] != arrays[name][0])[0])
            arrays[name][[0, other]] = arrays[name][[other, 0]]
        else:
            arrays[name] = arrays[name][::-1].copy()
    np.savez(file, **arrays)


def files(run: Path) -> dict[str, str]:
    found = (path for path in run.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def edit(run: Path, **changes: object) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "says"), [("x_train", "training inputs"), ("y_train", "training labels"), ("x_test", "test inputs")]
)
def test_other_data_under_the_same_name_are_refused(enfold, finished, recipe_file, small_data, name, says):
    before, kept = files(finished), small_data.read_bytes()
    change(small_data, name)
    for words in (
        ["evaluate", finished],
        ["distill", finished, "kd", "--label", "other"],
        ["train", finished, "batch_ensemble"],
        ["run", recipe_file, finished, "--resume"],
    ):
        done = enfold(*words)
        assert (done.code, f"{says}" in done.err) == (2, True), done.err
    assert files(finished) == before
    small_data.write_bytes(kept)
    assert enfold("merge", finished, "average", "--label", "other").code == 0


def test_an_interrupted_training_refuses_other_data(enfold, interrupted, recipe_file, small_data, tmp_path):
    interrupted(2, "run", recipe_file, tmp_path / "out")
    change(small_data, "x_train")
    done = enfold("run", recipe_file, tmp_path / "out", "--resume")
    assert (done.code, "training inputs" in done.err, "labels" in done.err) == (2, True, False)


def test_a_report_does_not_show_images_of_other_data(finished, small_data):
    assert collect(finished).examples.notice == ""
    change(small_data, "x_test")
    assert "no longer those of the run" in collect(finished).examples.notice


def test_a_changed_recipe_is_refused_with_the_setting(enfold, finished):
    plan = yaml.safe_load((finished / "recipe.yaml").read_text())["train"]
    edit(finished, train={**plan, "epochs": 4})
    done = enfold("evaluate", finished)
    assert (done.code, "train.epochs (3, now 4)" in done.err) == (2, True), done.err


def test_a_stored_step_with_other_settings_is_not_used(enfold, finished):
    """Neither where its settings were changed in the recipe, nor where the recipe has lost it."""
    assert enfold("distill", finished, "kd", "--label", "soft", "--set", "temperature=2").code == 0
    folds = yaml.safe_load((finished / "recipe.yaml").read_text())["steps"]
    weights = files(finished / "steps")["soft.safetensors"]
    edit(finished, steps=[{**each, "temperature": 5} if each["label"] == "soft" else each for each in folds])
    looked = enfold("evaluate", finished)
    assert (looked.code, "not finished: soft: " in looked.err) == (0, True), looked.err
    refused = enfold("run", finished / "recipe.yaml", finished, "--resume")
    assert (refused.code, "step.temperature (2, now 5)" in refused.err) == (2, True), refused.err
    edit(finished, steps=[each for each in folds if each["label"] != "soft"])
    again = ["distill", finished, "kd", "--label", "soft", "--json", "--set"]
    refused = enfold(*again, "temperature=5")
    assert (refused.code, "step.temperature (2, now 5)" in refused.err) == (2, True), refused.err
    assert files(finished / "steps")["soft.safetensors"] == weights, "nothing is lost"
    adopted = enfold(*again, "temperature=2")
    assert (adopted.code, "soft" in json.loads(adopted.out)["rows"]) == (0, True)
    assert files(finished / "steps")["soft.safetensors"] == weights


def test_a_stored_step_of_other_members_is_not_used(enfold, finished):
    manifest = finished / "steps" / "distill-fresh.json"
    content = json.loads(manifest.read_text())
    content["about"]["made_from"]["members' weights"] = "0" * 64
    manifest.write_text(json.dumps(content))
    done = enfold("evaluate", finished)
    assert (done.code, "members' weights" in done.err) == (2, True), done.err
