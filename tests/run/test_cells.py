"""Runs that are divided among processes: the same bits as in one, whatever ends early."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from enfold import DeepEnsemble, fit
from enfold.errors import EnfoldError
from enfold.executors import LocalExecutor
from enfold.io.usercode import looking_in, resolve
from enfold.run.cells import Shard

WEIGHTS = ("members", "steps", "controls", "predictions")


def digests(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
        if path.parent.name in WEIGHTS
    }


@pytest.fixture
def two_seeds(recipe_file: Path) -> Path:
    steps = "  - {method: repair, init: average, label: repaired}\n"  # needs another step
    recipe_file.write_text(recipe_file.read_text() + steps + "seeds: [0, 1]\n")
    return recipe_file


@pytest.mark.slow
def test_shards_and_gather_make_the_run_of_one_process(enfold, two_seeds: Path, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    assert enfold("run", two_seeds, one, "--executor", "serial").code == 0
    assert "10 parts of the run are left" in enfold("run", two_seeds, several, "--shard", "1/3").out
    early = enfold("gather", several)
    assert early.code == 2
    assert "10 are missing" in early.err
    assert "run its shards again" in early.err
    for shard in ("3/3", "2/3", "1/3", "2/3", "3/3"):  # in any order
        assert enfold("run", two_seeds, several, "--shard", shard).code == 0
    assert "all parts of" in enfold("run", two_seeds, several, "--shard", "1/3").out
    done = enfold("gather", several, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"].keys() == json.loads((one / "summary.json").read_text())["rows"].keys()
    assert digests(several) == digests(one)
    assert len(digests(one)) == 20
    assert not (several / "tasks").exists()


@pytest.mark.slow
def test_one_block_of_all_members_is_the_usual_run(enfold, recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "blocks"
    assert enfold("run", recipe_file, out, "--executor", "serial", "--block-size", 3).code == 0
    assert digests(out) == digests(finished)


@pytest.mark.slow
def test_auto_measures_and_says_what_it_chose(enfold, recipe_file: Path, tmp_path: Path) -> None:
    done = enfold("run", recipe_file, tmp_path / "out", "--executor", "auto")
    assert done.code == 0
    assert "3 blocks are trained in this process: estimated" in done.err


@pytest.mark.slow
def test_a_repeated_shard_costs_nothing(enfold, recipe_file: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    assert enfold("run", recipe_file, out, "--shard", "1/1").code == 0
    monkeypatch.setattr("enfold.executors.tasks._call", None)
    assert "all parts of" in enfold("run", recipe_file, out, "--shard", "1/1").out


def test_an_interrupted_shard_continues(enfold, interrupted, recipe_file: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    interrupted(5, "run", recipe_file, out, "--shard", "1/1")  # in the second epoch of the second member
    assert (out / "tasks").is_dir()
    refused = enfold("run", recipe_file, out, "--resume")
    assert refused.code == 2
    assert "add --executor serial" in refused.err
    assert enfold("run", recipe_file, out, "--resume", "--executor", "serial").code == 0
    assert enfold("run", recipe_file, whole, "--executor", "serial").code == 0
    assert digests(out) == digests(whole)


def test_a_failed_member_leaves_the_others_in_the_run(enfold, recipe_file: Path, tmp_path: Path) -> None:
    text = recipe_file.read_text().replace("lr: 0.01", "lr: [0.01, 1000000.0, 0.01], optimizer: sgd, select: last")
    recipe_file.write_text(text.partition("steps:")[0])
    out = tmp_path / "out"
    failed = enfold("run", recipe_file, out, "--executor", "serial")
    assert failed.code == 2
    assert "1 of 3 tasks failed, seed 0: member 1 with NonFiniteLoss" in failed.err
    assert "the others are stored" in failed.err
    assert len(list((out / "tasks").glob("members-*.safetensors"))) == 2
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [each["task"] for each in events if each["event"] == "failed"] == ["seed 0: member 1"]


def test_other_sizes_of_blocks_are_refused(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    enfold("run", recipe_file, out, "--shard", "1/3")
    refused = enfold("run", recipe_file, out, "--shard", "2/3", "--block-size", 2)
    assert refused.code == 2
    assert "use --block-size 1" in refused.err


def test_a_shard_of_another_recipe_is_refused(enfold, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    enfold("run", recipe_file, out, "--shard", "1/3")
    refused = enfold("run", recipe_file, out, "--shard", "2/3", "--set", "train.epochs=4")
    assert refused.code == 2
    assert "its own recipe" in refused.err


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/", "-1/2", "1/2/3", "²/3"])
def test_an_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(EnfoldError, match="--shard must be i/n"):
        Shard.parse(text)


def test_shards_share_all_cells() -> None:
    shards = [Shard.parse(f"{index}/3") for index in (1, 2, 3)]
    assert all(sum(shard.has(cell) for shard in shards) == 1 for cell in range(20))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--workers", 2], "--workers"),
        (["--block-size", 2], "--block-size"),
        (["--executor", "locl"], "local"),
        (["--executor", "local", "--address", "auto"], "address"),
        (["--shard", "1/2", "--set", "trajectory={every: 1}"], "trajectory"),
    ],
)
def test_options_without_meaning_are_refused(enfold, recipe_file: Path, tmp_path: Path, words, name: str) -> None:
    refused = enfold("run", recipe_file, tmp_path / "out", *words)
    assert refused.code == 2
    assert name in refused.err


SBATCH = """\
#!{python}
import os, subprocess, sys
script = sys.argv[sys.argv.index("--wrap") + 1]
array = next((word for word in sys.argv if word.startswith("--array=")), None)
count = int(array.partition("-")[2].rpartition("-")[2]) if array else 1
for index in range(1, count + 1):
    with open({log!r}, "a") as log:
        print(script, file=log)
        environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(index))
        subprocess.run(["bash", "-c", script], env=environment, check=True, stdout=log, stderr=log)
print(1234)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_script_for_slurm_makes_the_run(enfold, recipe_file: Path, tmp_path: Path) -> None:
    """With an `sbatch` that carries out what it is given."""
    out, log, programs = tmp_path / "the run", tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("sbatch", SBATCH.format(python=sys.executable, log=str(log))),
        ("enfold", f'#!/bin/sh\nexec {sys.executable} -m enfold "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    script = enfold("run", recipe_file, out, "--set", "train.epochs=2", "--print-sbatch", 2).out
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + log.read_text()
    assert log.read_text().count("--shard $SLURM_ARRAY_TASK_ID/2") == 4
    assert (out / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("words", [["local", "--workers", "2", "--threads", "1"], ["ray", "--workers", "2"]])
def test_processes_make_the_run_of_one(enfold, two_seeds: Path, tmp_path: Path, words: list[str]) -> None:
    if words[0] == "ray":
        pytest.importorskip("ray")
    one, out = tmp_path / "one", tmp_path / "out"
    assert enfold("run", two_seeds, one, "--executor", "serial").code == 0
    command = [sys.executable, "-m", "enfold", "run", str(two_seeds), str(out), "--executor", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert digests(out) == digests(one)
    shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["own.py:make", "ownmodule:make"])
def test_workers_have_the_code_of_the_user(tmp_path: Path, reference: str) -> None:
    """A worker unpickles networks of classes that exist in the user's file only."""
    text = "from torch import nn\n\nclass Own(nn.Linear):\n    pass\n\ndef make():\n    return Own(4, 2)\n"
    (tmp_path / reference.partition(":")[0].removesuffix(".py")).with_suffix(".py").write_text(text)
    with looking_in([tmp_path], trusted=True):
        make = resolve(reference)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data, states = (inputs, (inputs[:, 0] > 0).long()), []
    with LocalExecutor(1) as worker:
        for executor in ("serial", worker):
            ensemble = DeepEnsemble(make, 2)
            fit(ensemble, data, epochs=1, quiet=True, executor=executor)
            states.append(ensemble.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
