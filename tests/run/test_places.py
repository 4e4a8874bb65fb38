"""Files that a recipe or a command line names are found from anywhere, and the commands that are printed work."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAST = ("--set", "train.epochs=1", "--set", "cost=false", "--set", "data.val_size=60", "--trust-code")


@pytest.fixture
def project(tmp_path: Path, small_data: Path, monkeypatch) -> Iterator[Path]:
    """A folder with data and code of the user's own, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(small_data, folder / "mine.npz")
    (folder / "mine.py").write_text(
        "from torch import nn\n"
        "def mlp(shape, num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))\n"
    )
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("mine", None)


def elsewhere(project: Path) -> Path:
    folder = project.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.modules.pop("mine", None)  # as in another process
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mine.py:mlp", "mine:mlp"])
def test_a_run_with_user_code_resumes_from_any_folder(enfold, project, network):
    assert enfold("train", "runs/a", "--data", "mine.npz", "--network", network, "--members", 2, *FAST).code == 0
    elsewhere(project)
    for words in (["merge", "average"], ["evaluate"], ["report"]):
        trust = [] if words == ["report"] else ["--trust-code"]
        done = enfold(words[0], project / "runs/a", *words[1:], *trust)
        assert done.code == 0, done.err
    moved = project.parent / "moved"
    os.chdir(project.parent)
    project.rename(moved)
    assert enfold("merge", moved / "runs/a", "average", "--label", "again", "--trust-code").code == 0


def test_a_run_uses_the_code_of_its_original_folder(enfold, project):
    """Code of another recipe in the current folder is not used."""
    assert enfold("train", "a", "--data", "mine.npz", "--network", "mine.py:mlp", "--members", 2, *FAST).code == 0
    other = elsewhere(project) / "mine.py"
    other.write_text("raise RuntimeError('another file')\n")
    done = enfold("merge", project / "a", "average", "--trust-code")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_a_recipe_finds_code_in_its_folder(enfold, project):
    recipe = "data: {source: mine.npz, val_size: 60}\nnetwork: mine.py:mlp\ntrain: {epochs: 1}\ncost: false\n"
    (project / "recipe.yaml").write_text(f"{recipe}members: 2\nseeds: [0, 1]\nsteps: [average]\n")
    out = elsewhere(project) / "out"
    assert enfold("run", "../project/recipe.yaml", out, "--dry-run", "--trust-code").code == 0
    done = enfold("run", "../project/recipe.yaml", out, "--trust-code")
    assert done.code == 0, done.err
    os.chdir("/")
    done = enfold("merge", out, "weight_matching", "--trust-code")
    assert done.code == 0, done.err


def test_errors_list_the_searched_folders(enfold, project):
    assert enfold("train", "a", "--data", "mine.npz", "--network", "mine.py:mlp", "--members", 2, *FAST).code == 0
    (project / "mine.py").unlink()
    here = elsewhere(project)
    done = enfold("merge", project / "a", "average", "--trust-code")
    places = f"a Python file in {project} or {here} or {project / 'a'}"
    assert (done.code, places in done.err) == (2, True), done.err
    (project / "a" / "mine.py").write_text("from torch import nn\ndef mlp():\n    return nn.Linear(1, 1)\n")
    assert "the network must take inputs of shape" not in enfold("evaluate", project / "a", "--trust-code").err


def commands(text: str) -> list[list[str]]:
    """Return the printed commands: text between two spaces that starts with the program's name."""
    return [shlex.split(part)[1:] for part in text.replace("\n", "  ").split("  ") if part.startswith("enfold ")]


@pytest.mark.slow
def test_printed_commands_can_be_run(enfold, project, interrupted):
    done = enfold("train", "my runs/a", "--data", "mine.npz", "--network", "mine.py:mlp", "--members", 2, *FAST)
    fold, share = commands(done.out)
    assert (fold[-1], share[-1]) == ("--trust-code", "--trust-code")
    interrupted(1, *fold)
    told = enfold("evaluate", "my runs/a", "--trust-code").err
    finish, drop = commands(told.replace(", or drop", "  or drop"))
    assert enfold(*share).code == 0
    assert enfold(*finish).code == 0
    assert "kd" in json.loads(Path("my runs/a/summary.json").read_text())["rows"]
    assert enfold(*drop).code == 0


def test_the_remedy_for_missing_members_can_be_run(enfold, project, interrupted):
    given = ("--data", "mine.npz", "--network", "mine.py:mlp", "--members", 2, *FAST)
    interrupted(1, "train", "a", *given)
    refused = enfold("evaluate", "a", "--trust-code").err
    assert enfold(*shlex.split(refused.split("finish with enfold ")[1])).code == 0
    refused = enfold("report", "--card", "a").err
    assert enfold(*shlex.split(refused.split("create one with enfold ")[1])).code == 0
